internal import TokenLedger
internal import TokenModel

/// What all pages have in common: an HTML document without scripts, which loads nothing. Pure.
struct PageFrame {
    let address: PageAddress
    let title: String
    let now: Instant
    /// In how many seconds the page is loaded again; nil for a form, in which somebody may be typing.
    var period: Int? = 15

    /// - Parameter nonce: Allows the style sheet; see `headers`.
    func html(nonce: String, _ body: HTML) -> HTML {
        """
        <!doctype html>
        <html lang="en"><head><meta charset="utf-8"><title>\(title)</title>
        <meta name="viewport" content="width=device-width, initial-scale=1">\(refresh)
        <style nonce="\(nonce)">\(HTML(stringLiteral: PageStyle.text))</style></head><body>
        <header><h1>\(link(.overview, "tokenkeeperd"))</h1>
        <nav>\(link(.find, "Find a token or topic"))</nav><span class="muted">\(Figures.text(now))\(period.map { "; refreshes every \($0) s" } ?? "")</span></header>
        \(body)
        </body></html>

        """
    }

    private var refresh: HTML {
        period.map { "<meta http-equiv=\"refresh\" content=\"\($0)\">" } ?? ""
    }

    /// A link to another page. A topic that may be a device token has none: a program may have confused the two.
    func link(_ target: PageAddress, _ text: String) -> HTML {
        let path = target.path(from: address)
        return DeviceToken.cut(in: path) == path ? "<a href=\"\(path)\">\(text)</a>" : "\(text)"
    }

    /// The form of the search. Browsers do not store what is typed.
    ///
    /// - Parameter text: What was searched for, unless it may be a token.
    func search(_ text: String = "") -> HTML {
        """
        <form method="post" action="\(PageAddress.find.path(from: address))" autocomplete="off">
        <label for="q">Device token, or its first 8 or more digits; or a part of a topic's name</label>
        <div class="search"><input id="q" name="q" value="\(text)" maxlength="1100" autocomplete="off" autocapitalize="off" spellcheck="false">
        <button>Find</button></div></form>
        """
    }

    /// Nothing but the page's own style is loaded, a form leads only to this server, and no other site can frame the page.
    static func headers(nonce: String) -> [(name: String, value: String)] {
        [
            (
                "content-security-policy",
                "default-src 'none'; style-src 'nonce-\(nonce)'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
            ),
            ("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer"), ("cache-control", "no-store"),
        ]
    }
}

/// A table. On a phone, each row becomes a block in which each value has its column's name beside it.
struct PageTable {
    /// A name that ends with # is that of numbers.
    let columns: [String]
    let rows: [[HTML]]

    init(_ columns: [String], _ rows: [[HTML]]) {
        (self.columns, self.rows) = (columns, rows)
    }

    var html: HTML {
        let names = columns.map { $0.hasSuffix("#") ? (String($0.dropLast()), "number") : ($0, "name") }
        let head = names.map { "<th class=\"\($1)\">\($0)</th>" as HTML }
        let body = rows.map { row -> HTML in
            let cells = zip(names, row).map { name, value -> HTML in
                "<td class=\"\(name.1)\" data-label=\"\(name.0)\"><span>\(value)</span></td>"
            }
            return "<tr>\(cells)</tr>\n"
        }
        return "<table><thead><tr>\(head)</tr></thead><tbody>\n\(body)</tbody></table>"
    }
}
