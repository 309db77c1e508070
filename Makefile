# tokenkeeperd: `make run` and `make test` install what they need.

.PHONY: help run fake-apns test soak faults test-matrix reference fuzz test-deployment image test-image bench build release deb dist lint setup clean

help: ## Show this.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

run: ## Build, and start a private PostgreSQL, the daemon and a sample of traffic. With DATABASE_URL=…: only the daemon, on your database.
	@DATABASE_URL='$(subst ','\'',$(value DATABASE_URL))' exec scripts/run

fake-apns: ## Build and start a fake APNs on 127.0.0.1:2197. ARGS='--script FILE' and more: docs/reference/fake-apns.md.
	@ARGS='$(subst ','\'',$(value ARGS))' exec scripts/fake-apns

test: setup lint ## Build and run all tests on a private PostgreSQL.
	@scripts/setup servers clients router
	@scripts/test

soak: ## Before a release: random tests with new seeds and in full, the package on Debian 12 and 13, and the image. It takes hours.
	@TEST_SOAK=whole TEST_SEED=random $(MAKE) test
	@DEBIAN=bookworm scripts/test-deployment
	@DEBIAN=trixie scripts/test-deployment
	@scripts/test-image

faults: setup ## Try what holds beside faults: three daemons, applications, and kills, failovers, locks, outages in random order. MINUTES=60 SEED=1.
	@scripts/setup servers
	@swift build --build-tests
	@TEST_SOAK=whole FAULT_MINUTES='$(or $(value MINUTES),10)' TEST_SEED='$(or $(value SEED),random)' swift test --skip-build --disable-xctest --filter 'nothing is lost or counted twice, and no token'

test-matrix: setup ## Run the tests of the SQL, and a minute of faults, on PostgreSQL 15, 17 and 18. VERSIONS='17 18': on these.
	@VERSIONS='$(value VERSIONS)' exec scripts/test-matrix

reference: setup ## Rewrite the generated parts of docs/reference and the man page from the sources.
	@swift build --build-tests
	@REFERENCE=write swift test --skip-build --disable-xctest --filter 'The reference pages'

fuzz: setup ## Call every public SQL function 100,000 times with random input. CALLS=1000: 1,000 times.
	@CALLS='$(subst ','\'',$(value CALLS))' exec scripts/fuzz

test-deployment: ## Install the package on a separate machine with systemd and PostgreSQL, and test everything there. DEBIAN=trixie: one of Debian 13.
	@DEBIAN='$(value DEBIAN)' exec scripts/test-deployment

image: ## Build the package and the container image localhost/tokenkeeperd. BASE=IMAGE: on that image of Debian.
	@BASE='$(subst ','\'',$(value BASE))' exec scripts/image

test-image: ## Build the container image on a base made of Debian's packages, and test it, compose.yaml and the example for Kubernetes.
	@scripts/test-image

bench: ## Compare with bare SQL and other queues; report in .build/bench. QUICK=1: in minutes. ONLY=drain,peers: some of it. ONLY=growth: a ledger of 50 million tokens. BENCH_BEFORE=REVISION: with the client of that one.
	@exec scripts/bench

build: setup ## Build for debugging.
	@swift build

release: setup ## Build the binary for installing: optimized, hardened, with Swift's libraries linked in.
	@program=$$(scripts/release tokenkeeperd) && echo "built $$program"

deb: ## Build the Debian package and its bill of materials (SPDX), into dist/.
	@scripts/deb

dist: ## Build what is published: package, tarball, image, bill of materials and checksums, into dist/. BASE=IMAGE, or IMAGE=no.
	@BASE='$(subst ','\'',$(value BASE))' IMAGE='$(value IMAGE)' exec scripts/dist

lint: ## Check the format of the Swift sources, and the size of files and functions.
	@scripts/lint
	@swift format lint --strict --recursive Package.swift Plugins Sources Tests Benchmarks

setup: ## Install missing Debian packages.
	@scripts/setup

clean: ## Remove what was built, and the private PostgreSQL of `make run`.
	rm -rf .build .run dist
