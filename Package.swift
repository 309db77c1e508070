// swift-tools-version: 6.2
import PackageDescription

let strict: [SwiftSetting] = [
    .swiftLanguageMode(.v6),
    .treatAllWarnings(as: .error),
    .strictMemorySafety(),
    .enableUpcomingFeature("ExistentialAny"),
    .enableUpcomingFeature("InternalImportsByDefault"),
    .enableUpcomingFeature("MemberImportVisibility"),
    .enableUpcomingFeature("NonisolatedNonsendingByDefault"),
    .enableUpcomingFeature("InferIsolatedConformances"),
]

// Tests use processes, sockets and signals. Marking each call as unsafe would add nothing there.
let lenient: [SwiftSetting] = [.swiftLanguageMode(.v6), .treatAllWarnings(as: .error)]

// docs/decisions/dependencies.md justifies each dependency. Versions are exact: each update is a separate commit, which the tests
// check.
let package = Package(
    name: "tokenkeeperd",
    products: [
        .executable(name: "tokenkeeperd", targets: ["tokenkeeperd"])
    ],
    dependencies: [
        .package(url: "https://github.com/apple/swift-argument-parser", exact: "1.8.2"),
        .package(url: "https://github.com/apple/swift-log", exact: "1.16.2"),
        .package(url: "https://github.com/apple/swift-nio", exact: "2.101.2"),
        // Only for the fake APNs of the tests.
        .package(url: "https://github.com/apple/swift-nio-http2", exact: "1.46.0"),
    ],
    targets: [
        .systemLibrary(name: "CLibPQ", pkgConfig: "libpq", providers: [.apt(["libpq-dev"])]),

        .systemLibrary(name: "CCurl", pkgConfig: "libcurl", providers: [.apt(["libcurl4-openssl-dev"])]),
        .systemLibrary(name: "CLinux"),
        .systemLibrary(name: "CNgHTTP2", pkgConfig: "libnghttp2", providers: [.apt(["libnghttp2-dev"])]),
        .systemLibrary(name: "COpenSSL", pkgConfig: "libcrypto", providers: [.apt(["libssl-dev"])]),

        .target(name: "TokenModel", swiftSettings: strict),
        .target(
            name: "APNsFeedback", dependencies: ["CCurl", "CNgHTTP2", "COpenSSL", "TokenModel"], swiftSettings: strict),
        .target(
            name: "TokenLedger",
            dependencies: ["CLibPQ", "TokenModel"],
            swiftSettings: strict,
            plugins: ["EmbedMigrations"]),
        .executableTarget(
            name: "tokenkeeperd",
            dependencies: [
                "APNsFeedback", "CLinux", "COpenSSL", "TokenLedger", "TokenModel",
                .product(name: "ArgumentParser", package: "swift-argument-parser"),
                .product(name: "Logging", package: "swift-log"),
                .product(name: "NIOCore", package: "swift-nio"),
                .product(name: "NIOHTTP1", package: "swift-nio"),
                .product(name: "NIOPosix", package: "swift-nio"),
            ],
            swiftSettings: strict),

        .executableTarget(name: "embed-migrations", swiftSettings: strict),
        .plugin(name: "EmbedMigrations", capability: .buildTool(), dependencies: ["embed-migrations"]),

        .target(
            name: "LedgerTestSupport",
            dependencies: ["CLibPQ", "TestRun", "TokenLedger", "TokenModel"],
            path: "Tests/LedgerTestSupport",
            swiftSettings: lenient),
        // Without Testing, which a release build such as that of the benchmark does not have.
        .target(name: "TestRun", path: "Tests/TestRun", swiftSettings: lenient),
        .target(
            name: "TestThreads", dependencies: ["TestRun"], path: "Tests/TestThreads", swiftSettings: lenient),
        .target(
            name: "FakeAPNs",
            dependencies: [
                "COpenSSL",
                .product(name: "NIOCore", package: "swift-nio"),
                .product(name: "NIOPosix", package: "swift-nio"),
                .product(name: "NIOTLS", package: "swift-nio"),
                .product(name: "NIOHPACK", package: "swift-nio-http2"),
                .product(name: "NIOHTTP2", package: "swift-nio-http2"),
            ],
            path: "Tests/FakeAPNs",
            swiftSettings: lenient,
            linkerSettings: [.linkedLibrary("ssl")]),
        // `make fake-apns`; not installed.
        .executableTarget(
            name: "fake-apns",
            dependencies: ["FakeAPNs", .product(name: "ArgumentParser", package: "swift-argument-parser")],
            path: "Tests/FakeAPNsCommand",
            swiftSettings: lenient),
        // `make bench`; not installed.
        .executableTarget(
            name: "tokenkeeper-bench",
            dependencies: [
                "APNsFeedback", "CLibPQ", "TokenLedger", "TokenModel", "LedgerTestSupport",
                .product(name: "ArgumentParser", package: "swift-argument-parser"),
            ],
            path: "Benchmarks/tokenkeeper-bench",
            swiftSettings: lenient),
        .testTarget(name: "TokenModelTests", dependencies: ["TokenModel"], swiftSettings: lenient),
        .testTarget(
            name: "APNsFeedbackTests",
            dependencies: [
                "APNsFeedback", "CNgHTTP2", "FakeAPNs", "LedgerTestSupport", "TestRun", "TestThreads", "TokenModel",
                .product(name: "NIOCore", package: "swift-nio"),
                .product(name: "NIOPosix", package: "swift-nio"),
            ],
            swiftSettings: lenient),
        .testTarget(
            name: "FakeAPNsTests",
            dependencies: [
                "FakeAPNs", "fake-apns", "TestRun", "TestThreads",
                .product(name: "NIOCore", package: "swift-nio"),
                .product(name: "NIOPosix", package: "swift-nio"),
                .product(name: "NIOHPACK", package: "swift-nio-http2"),
                .product(name: "NIOHTTP2", package: "swift-nio-http2"),
            ],
            swiftSettings: lenient),
        .testTarget(
            name: "TokenLedgerTests",
            dependencies: ["APNsFeedback", "TokenLedger", "TokenModel", "LedgerTestSupport", "TestRun", "TestThreads"],
            swiftSettings: lenient),
        .testTarget(
            name: "TokenkeeperdTests",
            dependencies: [
                "tokenkeeperd", "APNsFeedback", "TokenLedger", "TokenModel", "DocumentSnippets", "FakeAPNs",
                "LedgerTestSupport", "TestRun", "TestThreads",
            ],
            exclude: ["old-names.txt", "Fixtures"],
            swiftSettings: lenient),
        // The Swift snippets of the documents, which only have to compile.
        .target(
            name: "DocumentSnippets", dependencies: ["FakeAPNs"], path: "Tests/DocumentSnippets",
            swiftSettings: [.swiftLanguageMode(.v5)]),
        // nginx, Apache, HAProxy, nghttpx and nghttpd, which `scripts/setup servers` gets.
        .testTarget(
            name: "ThirdPartyServersTests",
            dependencies: [
                "APNsFeedback", "FakeAPNs", "LedgerTestSupport", "TestRun", "TestThreads", "TokenModel",
                .product(name: "NIOCore", package: "swift-nio"),
                .product(name: "NIOHTTP1", package: "swift-nio"),
                .product(name: "NIOPosix", package: "swift-nio"),
            ],
            path: "Tests/ThirdPartyServers",
            swiftSettings: lenient),
    ]
)
