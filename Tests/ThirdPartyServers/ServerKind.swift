import Foundation
import LedgerTestSupport
import Testing

/// A server from Debian's packages: how to start it in front of a backend, and which signals it understands.
enum ServerKind: Sendable, CustomTestStringConvertible {
    case nginx(keepaliveRequests: Int)
    case apache
    case haproxy
    case nghttpx
    /// Has no backend: it answers with the payload, and writes into its log what it receives.
    case nghttpd
    /// A proxy that makes tunnels to one port only, for a user with a password. With `isEncrypted` it asks for a client certificate.
    case apacheProxy(isEncrypted: Bool)
    /// A proxy with TLS, which speaks HTTP/2 if it is offered, before one without.
    case nghttpxProxy

    static let proxyUser = "tunnel"
    static let proxyPassword = "pass:word@/%41"

    var testDescription: String {
        switch self {
        case .nginx(let requests): "nginx, keepalive_requests \(requests)"
        case .apache: "Apache"
        case .haproxy: "HAProxy"
        case .nghttpx: "nghttpx"
        case .nghttpd: "nghttpd"
        case .apacheProxy(let isEncrypted): "Apache as \(isEncrypted ? "an HTTPS" : "a") proxy"
        case .nghttpxProxy: "nghttpx as an HTTPS proxy"
        }
    }

    private var program: String {
        switch self {
        case .nginx: "nginx"
        case .apache, .apacheProxy: "apache2"
        case .haproxy: "haproxy"
        case .nghttpx, .nghttpxProxy: "nghttpx"
        case .nghttpd: "nghttpd"
        }
    }

    /// Reloads the configuration: it starts new workers, and the old ones end when their streams have ended.
    var reload: Int32 {
        switch self {
        case .nginx, .nghttpx, .nghttpxProxy: SIGHUP
        case .apache, .apacheProxy: SIGUSR1
        case .haproxy: SIGUSR2
        // It can do neither, and just ends.
        case .nghttpd: SIGTERM
        }
    }

    /// Accepts no more connections, and ends when its streams have ended.
    var gracefulStop: Int32 {
        switch self {
        case .nginx, .nghttpx, .nghttpxProxy: SIGQUIT
        case .apache, .apacheProxy: SIGWINCH
        case .haproxy: SIGUSR1
        case .nghttpd: SIGTERM
        }
    }

    /// Whether requests that it has accepted may lose their answers at a reload or a graceful stop. Apache 2.4.71 ends some connections
    /// with GOAWAY and nghttp2's error -902 as its code, and drops streams that the same GOAWAY calls processed.
    var losesAnswers: Bool {
        if case .apache = self { true } else { false }
    }

    /// Writes its configuration into the folder.
    ///
    /// - Returns: The command that starts it.
    func prepare(in folder: String, port: Int, backend: Int) throws -> [String] {
        let command = try Self.find("sbin/\(program)")
        let file = "\(folder)/configuration"
        switch self {
        case .nginx(let requests):
            try Self.nginx(folder, port, backend, requests).write(toFile: file, atomically: true, encoding: .utf8)
            return [command, "-p", folder, "-e", "\(folder)/error.log", "-c", file]
        case .apache:
            let modules = try Self.find("lib/apache2/modules")
            try Self.apache(folder, port, backend, modules).write(toFile: file, atomically: true, encoding: .utf8)
            return [command, "-f", file, "-DFOREGROUND"]
        case .haproxy:
            try Self.haproxy(folder, port, backend).write(toFile: file, atomically: true, encoding: .utf8)
            return [command, "-W", "-f", file]
        case .apacheProxy(let isEncrypted):
            let modules = try Self.find("lib/apache2/modules")
            let hash = try TestCluster.run(["openssl", "passwd", "-apr1", Self.proxyPassword])
            try "\(Self.proxyUser):\(hash.trimmingCharacters(in: .whitespacesAndNewlines))\n".write(
                toFile: "\(folder)/users", atomically: true, encoding: .utf8)
            try Self.proxy(folder, port, backend, modules, isEncrypted)
                .write(toFile: file, atomically: true, encoding: .utf8)
            return [command, "-f", file, "-DFOREGROUND"]
        case .nghttpx, .nghttpxProxy:
            var command = [command]
            if case .nghttpxProxy = self { command.append("--http2-proxy") }
            return command + [
                "--conf=/dev/null", "--frontend=127.0.0.1,\(port)", "--backend=127.0.0.1,\(backend)",
                "--workers=2", "--no-ocsp", "--errorlog-file=\(folder)/error.log", "--pid-file=\(folder)/pid",
                "\(folder)/server.key", "\(folder)/server.pem",
            ]
        case .nghttpd:
            return [
                command, "--verbose", "--hexdump", "--echo-upload", "--address=127.0.0.1", "--htdocs=\(folder)",
                "\(port)", "\(folder)/server.key", "\(folder)/server.pem",
            ]
        }
    }

    /// Below `.build/servers`, where `scripts/setup servers` puts it, or where Debian installs it.
    private static func find(_ name: String) throws -> String {
        let repository = URL(fileURLWithPath: #filePath).appendingPathComponent("../../..").standardized.path
        let places = ["\(repository)/.build/servers/usr/\(name)", "/usr/\(name)"]
        guard let place = places.first(where: FileManager.default.fileExists(atPath:)) else {
            throw TestFailure("\(name) is neither installed nor below .build/servers; run: scripts/setup servers")
        }
        return place
    }

    // Configurations ------------------------------------------------------------------------------------------------

    /// `proxy_next_upstream off`: it must not send a request twice itself.
    private static func nginx(_ folder: String, _ port: Int, _ backend: Int, _ requests: Int) -> String {
        """
        daemon off;
        worker_processes 2;
        pid \(folder)/pid;
        error_log \(folder)/error.log warn;
        events { worker_connections 4096; }
        http {
            access_log off;
            client_body_temp_path \(folder)/body;
            proxy_temp_path \(folder)/proxy;
            fastcgi_temp_path \(folder)/fastcgi;
            uwsgi_temp_path \(folder)/uwsgi;
            scgi_temp_path \(folder)/scgi;
            keepalive_requests \(requests);
            keepalive_timeout 3600s;
            upstream backend {
                server 127.0.0.1:\(backend);
                keepalive 1000;
                keepalive_requests 1000000000;
                keepalive_timeout 3600s;
            }
            server {
                listen 127.0.0.1:\(port) ssl http2;
                ssl_certificate \(folder)/server.pem;
                ssl_certificate_key \(folder)/server.key;
                location / {
                    proxy_pass http://backend;
                    proxy_http_version 1.1;
                    proxy_set_header Connection "";
                    proxy_next_upstream off;
                }
            }
        }
        """
    }

    private static func apache(_ folder: String, _ port: Int, _ backend: Int, _ modules: String) -> String {
        let loads = ["mpm_event", "authz_core", "ssl", "http2", "proxy", "proxy_http"].map {
            "LoadModule \($0)_module \(modules)/mod_\($0).so"
        }
        return loads.joined(separator: "\n") + """

            ServerRoot \(folder)
            DefaultRuntimeDir \(folder)
            ServerName localhost
            PidFile \(folder)/pid
            ErrorLog \(folder)/error.log
            LogLevel warn
            Mutex file:\(folder) default
            Listen 127.0.0.1:\(port)
            ServerLimit 8
            StartServers 2
            ThreadsPerChild 64
            MaxRequestWorkers 512
            KeepAlive On
            KeepAliveTimeout 3600
            Protocols h2
            SSLEngine On
            SSLCertificateFile \(folder)/server.pem
            SSLCertificateKeyFile \(folder)/server.key
            ProxyPass / http://127.0.0.1:\(backend)/ retry=0

            """
    }

    private static func proxy(
        _ folder: String, _ port: Int, _ backend: Int, _ modules: String, _ isEncrypted: Bool
    ) -> String {
        let loads = [
            "mpm_event", "authz_core", "authz_user", "authn_core", "authn_file", "auth_basic", "ssl", "proxy",
            "proxy_connect",
        ].map { "LoadModule \($0)_module \(modules)/mod_\($0).so" }
        let tls = """
            SSLEngine On
            SSLCertificateFile \(folder)/server.pem
            SSLCertificateKeyFile \(folder)/server.key
            SSLVerifyClient optional_no_ca
            """
        return loads.joined(separator: "\n") + """

            ServerRoot \(folder)
            DefaultRuntimeDir \(folder)
            ServerName localhost
            PidFile \(folder)/pid
            ErrorLog \(folder)/error.log
            CustomLog \(folder)/access.log "%r, user %u, status %>s, certificate %{SSL_CLIENT_VERIFY}x"
            BufferedLogs Off
            Mutex file:\(folder) default
            Listen 127.0.0.1:\(port)
            Protocols http/1.1
            \(isEncrypted ? tls : "")
            ProxyRequests On
            AllowCONNECT \(backend)
            <Proxy "*">
                AuthType Basic
                AuthName proxy
                AuthBasicProvider file
                AuthUserFile \(folder)/users
                Require valid-user
            </Proxy>

            """
    }

    private static func haproxy(_ folder: String, _ port: Int, _ backend: Int) -> String {
        """
        global
            maxconn 4096
            nbthread 2
            stats socket \(folder)/socket level admin expose-fd listeners
        defaults
            mode http
            timeout connect 10s
            timeout client 1h
            timeout server 1h
            timeout http-keep-alive 1h
            http-reuse always
            retries 0
        frontend apns
            bind 127.0.0.1:\(port) ssl crt \(folder)/both.pem alpn h2
            default_backend backend
        backend backend
            server one 127.0.0.1:\(backend)

        """
    }
}
