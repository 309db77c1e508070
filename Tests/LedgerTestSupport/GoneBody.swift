/// The body of a 410 as APNs sends it, as an SQL literal: the token is stale since November 6, 2026.
public let goneBody = #"'{"reason":"Unregistered","timestamp":1794000000123}'"#
