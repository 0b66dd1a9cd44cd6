# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The Sluice Authors

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
# Seconds that `make fuzz` gives each target.
FUZZTIME ?= 10s
# How many times as long as in a plain run `make test-random` draws.
TIMES ?= 40
# What the tests take their programs from.
export SLUICE_BIN := $(CURDIR)/bin

# Every binary and the directory of its main package.
binaries := sluice sluice-cni sluice-ipam sluice-identity sluice-policy sluice-loadbalancer sluice-controller sluice-hubble sluice-store sluice-datapath sluice-dns sluice-http
main_of_sluice          := cmd/sluice
main_of_sluice-cni      := services/cni-shim
main_of_sluice-ipam     := services/ipam
main_of_sluice-identity := services/identity
main_of_sluice-policy   := services/policy
main_of_sluice-loadbalancer := services/loadbalancer
main_of_sluice-controller := services/controller
main_of_sluice-hubble     := services/hubble
main_of_sluice-store := services/store
main_of_sluice-datapath := services/datapath
main_of_sluice-dns := services/dns
main_of_sluice-http := services/http

# Static binaries that say the same wherever the checkout lies. grpcnotrace
# leaves out a debug page that nobody reaches, and 4 MB of each binary with it.
go_build := CGO_ENABLED=0 go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X github.com/sluice-net/sluice/kit/version.linkVersion=$(VERSION)"

.PHONY: help
help: ## Say what there is to make
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build $(binaries:%=bin/%) bin/sluice-devetcd
build: $(binaries:%=bin/%) bin/sluice-devetcd ## Put every static binary into bin/; needs nothing but Go

# Always asked: the go command knows what is out of date.
$(binaries:%=bin/%):
	@$(go_build) -o $@ ./$(main_of_$(@F))

bin/sluice-devetcd:
	@cd tools/devetcd && GOWORK=off $(go_build) -o $(CURDIR)/$@ .

# Where `make install` puts the files of a machine with systemd.
DESTDIR ?=
.PHONY: install
install: $(binaries:%=bin/%) ## Copy programs, units, sysusers.d and tmpfiles.d to where they belong below DESTDIR (root)
	@install -d $(DESTDIR)/usr/bin $(DESTDIR)/usr/lib/systemd/system $(DESTDIR)/usr/lib/sysusers.d $(DESTDIR)/usr/lib/tmpfiles.d $(DESTDIR)/usr/share/sluice
	@install -m 0755 $(binaries:%=bin/%) $(DESTDIR)/usr/bin
	@install -m 0644 deploy/systemd/* $(DESTDIR)/usr/lib/systemd/system
	@install -m 0644 deploy/sysusers.d/sluice.conf $(DESTDIR)/usr/lib/sysusers.d
	@install -m 0644 deploy/tmpfiles.d/sluice.conf $(DESTDIR)/usr/lib/tmpfiles.d
	@install -m 0644 deploy/cni/10-sluice.conflist $(DESTDIR)/usr/share/sluice

# What an image is called, and for which machines there is one.
IMAGE ?= sluice.io/sluice:$(VERSION)
# The same repository with the suffix -devetcd, before the tag.
devetcd_image = $(shell printf %s '$(IMAGE)' | sed 's/\(:[^:/]*\)\{0,1\}$$/-devetcd\1/')
architectures := amd64 arm64

# One image with every program; the runtimes say /var/run where they mean /run.
.PHONY: images
images: ## Write bin/images/*.tar: OCI archives of one image with every program and one with the development etcd
	@$(foreach arch,$(architectures), \
		$(foreach b,$(binaries),GOARCH=$(arch) $(go_build) -o bin/images/$(arch)/$b ./$(main_of_$b) &&) \
		(cd tools/ociimage && GOWORK=off go run ./cmd/ociimage -output $(CURDIR)/bin/images/sluice-$(arch).tar -name $(IMAGE) -architecture $(arch) \
			$(foreach b,$(binaries),-file /usr/bin/$b=$(CURDIR)/bin/images/$(arch)/$b) \
			-dir /run -link /var/run=../run -env PATH=/usr/bin -label org.opencontainers.image.version=$(VERSION)) && \
		(cd tools/devetcd && GOWORK=off GOARCH=$(arch) $(go_build) -o $(CURDIR)/bin/images/$(arch)/sluice-devetcd .) && \
		(cd tools/ociimage && GOWORK=off go run ./cmd/ociimage -output $(CURDIR)/bin/images/sluice-devetcd-$(arch).tar \
			-name $(devetcd_image) -architecture $(arch) \
			-file /usr/bin/sluice-devetcd=$(CURDIR)/bin/images/$(arch)/sluice-devetcd -env PATH=/usr/bin) &&) true
	@ls bin/images/*.tar

.PHONY: demo
demo: build ## Show three pods of a real container runtime on a real datapath, then three nodes (root)
	@scripts/deps demo
	@scripts/tools grpcurl
	@scripts/demo

.PHONY: test
test: build ## Run every test, with the race detector but for those of kernel maps, files and parsers; every test has to run (root)
	@scripts/deps test demo examples
	@scripts/tools gotestsum cnitool grpcurl
	@scripts/test

.PHONY: test-faults
test-faults: build ## Kill every process at every step of ADD and DEL, all by all (root, long)
	@scripts/deps demo
	@scripts/tools gotestsum
	@SLUICE_TEST_FAULTS=all scripts/test --only-node '^TestFault'

# The versions from which an upgrade is tested.
FROM ?= b7deab4c
K8S_FROM ?= b7deab4c
K8S_NODES_FROM ?= b7deab4c
.PHONY: test-upgrade
test-upgrade: build ## Upgrade a node with open connections from the programs of the commit FROM (b7deab4c) to these, and back (root)
	@scripts/test-upgrade $(FROM)

RESTARTS ?= 20
EVERY ?= 20ms
.PHONY: test-restarts
test-restarts: build ## Begin connections in every way, one EVERY (20ms), while each process of a node restarts RESTARTS (20) times (root, long)
	@SLUICE_BIN=$(CURDIR)/bin SLUICE_TEST_RESTARTS=$(RESTARTS) SLUICE_TEST_ATTEMPTS=$(EVERY) \
		go test -count=1 -v -timeout 4h -run '^TestNewConnectionsSucceedWhileProcessesRestart$$' ./test/cluster

CHURN ?= 1h
.PHONY: test-churn
test-churn: build ## Resolve 10,000 names with rotating addresses for CHURN (1h), and connect to them; memory has to stay flat (root, long)
	@SLUICE_BIN=$(CURDIR)/bin SLUICE_TEST_CHURN=$(CHURN) \
		go test -count=1 -v -timeout 4h -run '^TestAddressesThatRotateAreNeverDenied$$' ./test/node

QUESTIONS ?= 20000
.PHONY: test-model
test-model: build ## Ask a cluster QUESTIONS (20,000) random questions in each mode or in MODE, and a model what is right; SEED makes them again, ROUND and QUESTION one of them (root, long)
	@SLUICE_BIN=$(CURDIR)/bin SLUICE_TEST_MODEL_SEED=$(SEED) SLUICE_TEST_MODEL_QUESTIONS=$(QUESTIONS) \
		SLUICE_TEST_MODEL_MODE=$(MODE) SLUICE_TEST_MODEL_ROUND=$(ROUND) SLUICE_TEST_MODEL_QUESTION=$(QUESTION) \
		go test -count=1 -v -timeout 4h -run '^TestClusterDoesWhatTheModelSays$$' ./test/cluster

HUBBLE ?= v1.20.2
.PHONY: bin/hubble
bin/hubble:
	@# Their module has replacements, with which "go install" refuses it.
	@mkdir -p bin/hubble
	@dir=$$(GOWORK=off go mod download -json github.com/cilium/cilium@$(HUBBLE) | sed -n 's/^\t"Dir": "\(.*\)",$$/\1/p') && \
		GOWORK=off CGO_ENABLED=0 go build -C "$$dir" -buildvcs=false -o $(CURDIR)/bin/hubble/ ./hubble ./hubble-relay

.PHONY: hubble-relay-image
hubble-relay-image: bin/hubble ## Write the image of hubble-relay of the version HUBBLE (v1.20.2) to bin/images/ (the first build takes minutes)
	@mkdir -p bin/images
	@cd tools/ociimage && GOWORK=off go run ./cmd/ociimage -output $(CURDIR)/bin/images/hubble-relay-$$(go env GOARCH).tar \
		-name sluice.io/hubble-relay:$(HUBBLE) -architecture $$(go env GOARCH) -file /hubble-relay=$(CURDIR)/bin/hubble/hubble-relay \
		-entrypoint /hubble-relay

.PHONY: test-hubble
test-hubble: build hubble-relay-image ## Run the unchanged hubble CLI and hubble-relay of the version HUBBLE (v1.20.2) against two nodes, and build the image of hubble-relay (root; the first build takes minutes)
	@scripts/tools grpcurl
	@SLUICE_BIN=$(CURDIR)/bin go test -count=1 -v -timeout 20m -tags hubble,grpcnotrace -run '^TestHubbleCLI' ./test/cluster ./services/hubble/internal/server

.PHONY: test-browser
test-browser: ## Build the web page of sluice-hubble again and compare it, and open it with Debian's chromium (root)
	@scripts/deps browser
	@rm -rf bin/page && mkdir -p bin/page && scripts/page $(CURDIR)/bin/page
	@for f in bin/page/*.js; do cmp $$f services/hubble/internal/server/page/assets/$${f##*/} || \
		{ echo "run scripts/page: services/hubble/internal/server/page/assets is not built from its source" >&2; exit 1; }; done
	@SLUICE_SCREENSHOTS=$(SCREENSHOTS) go -C services/hubble test -count=1 -v -timeout 10m -tags browser,grpcnotrace -run '^TestBrowser' .

.PHONY: page
page: ## Compile the web page of sluice-hubble from TypeScript (needs npm)
	@scripts/page

.PHONY: test-install
test-install: build ## Execute docs/operations/install-host.md on a minimal Debian with systemd, made by debootstrap (root)
	@scripts/deps install
	@go build -o bin/test/install ./test/install
	@bin/test/install

.PHONY: test-vectors
test-vectors: ## Run the policy vectors (of the directory POLICY_VECTORS, if set) and print figures per file
	@go -C services/policy test -count=1 -v -run '^TestVectors$$' ./internal/test/vectors

.PHONY: test-random
test-random: ## Compare the policy tables with the rules read directly, on TIMES (40) times a million random questions
	@POLICY_RANDOM=$(TIMES) go -C services/policy test -count=1 -v -timeout 6h ./internal/engine

.PHONY: bench-policy
bench-policy: ## Measure the policy engine, and the memory of a process that holds it
	@go -C services/policy test -run '^$$' -bench . -benchmem ./internal/engine ./internal/owner
	@go build -o bin/test/policy-bench ./services/policy/internal/test/policy-bench
	@go build -o bin/test/sluice-policy ./services/policy
	@bin/test/policy-bench -service bin/test/sluice-policy

.PHONY: bench-policy-api
bench-policy-api: build bin/sluice-devetcd bin/test/sluice-k8s ## Measure policies from the write to a Kubernetes API to the tables, and 10,000 of them
	@scripts/k8s-binaries kube-apiserver kubectl
	@cd test/k8s && GOWORK=off go test -run '^$$' -bench '^BenchmarkAPIWrite' -benchtime 1000x .
	@cd test/k8s && GOWORK=off go test -run '^$$' -bench '^BenchmarkAPITen' -benchtime 1x .

.PHONY: bench-state
bench-state: bin/sluice-devetcd ## Measure for how long the owners of identities and addresses keep callers waiting, at the size of a full cluster (root)
	@nice -n -10 go -C services/identity test -run '^$$' -bench '^Benchmark(Owner|Burst)$$' -benchtime 1x ./internal/etcd
	@# In memory: a disk that takes long to sync says nothing of the ledger.
	@TMPDIR=/dev/shm nice -n -10 go -C services/ipam test -run '^$$' -bench '^BenchmarkOwner$$' -benchtime 1x ./internal/ipam

.PHONY: test-kernels
test-kernels: ## Run the kernel tests on Debian's 6.1, 6.12 and newest kernels, in software (root)
	@scripts/deps kernels
	@scripts/test-kernels

.PHONY: test-vectors-kernel
test-vectors-kernel: ## Ask the programs what the policy vectors ask (of POLICY_VECTORS, if set), figures per file (root)
	@SLUICE_EQUIVALENCE_EVERY=1 go -C services/datapath test -count=1 -v -timeout 60m -run '^TestKernelTablesDecideTheVectorsAsTheEngine$$' ./internal/policy/equivalence

.PHONY: test-equivalence
test-equivalence: ## Compare the programs with the policy engine on 1,000,000 random pairs (root; PAIRS and SEED, if set)
	@SLUICE_EQUIVALENCE_PAIRS=$(or $(PAIRS),1000000) SLUICE_EQUIVALENCE_SEED=$(SEED) go -C services/datapath test -count=1 -v -timeout 120m \
		-run '^TestKernelTablesDecideRandomPoliciesAsTheEngine$$' ./internal/policy/equivalence

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (10s)
	@scripts/fuzz $(FUZZTIME)

# Its module is no part of the workspace: nothing of Sluice is built with what a
# cluster is built from.
.PHONY: bin/test/sluice-k8s
bin/test/sluice-k8s:
	@cd test/k8s && GOWORK=off CGO_ENABLED=0 go build -trimpath -buildvcs=false -o $(CURDIR)/$@ .

.PHONY: test-k8s-api
test-k8s-api: build bin/test/sluice-k8s ## Test against a Kubernetes API without a cluster, of 1.36 or of KUBERNETES=1.33, 1.34, 1.35 (the first build takes long)
	@scripts/k8s-binaries kube-apiserver$(KUBERNETES:%=-%) kubectl
	@cd test/k8s && GOWORK=off SLUICE_KUBERNETES=$(KUBERNETES) go test -count=1 -v -timeout=30m -run '^TestAPI' .

# Those of a cluster; the tests of Kubernetes and containerd 2 are built where
# they are asked for.
k8s_programs := kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl coredns agnhost

.PHONY: k8s
k8s: bin/sluice-devetcd bin/test/sluice-k8s
	@scripts/deps k8s
	@scripts/k8s-binaries $(k8s_programs)
	@CGO_ENABLED=0 go build -trimpath -buildvcs=false -o bin/k8s/pause ./test/pause
	@scripts/k8s-images

.PHONY: k8s-up
k8s-up: k8s ## Start a Kubernetes cluster of NODES (1) nodes in namespaces, and leave it running (root; the first build takes long)
	@bin/test/sluice-k8s up -nodes=$(or $(NODES),1) dev

.PHONY: k8s-down
k8s-down: ## End the cluster of k8s-up, and remove what is left of it
	@bin/test/sluice-k8s down dev

.PHONY: test-k8s
test-k8s: k8s ## Run the tests that need a Kubernetes cluster (root; the first build takes long)
	@scripts/k8s-binaries containerd containerd-shim-runc-v2 ctr
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd test/k8s && GOWORK=off go test -count=1 -v -timeout=45m -skip '^Test(ClusterIsUpgraded|NodesOfTwoVersions|Migration|Helm|Critest|Cyclonus|PolicyAPI|.*Specs)' ./...

# The suites of Kubernetes' own specs, on clusters of two nodes.
k8s_suites := netpol services conformance

.PHONY: $(k8s_suites:%=test-k8s-%)
test-k8s-netpol: ## Run Kubernetes' specs of NetworkPolicy, or those that match SPECS, in both modes of routing or in MODE (root, 30 minutes)
test-k8s-services: ## Likewise those of Services (root)
test-k8s-conformance: ## Likewise those of the network that a conformant cluster passes (root)
$(k8s_suites:%=test-k8s-%): test-k8s-%: k8s
	@scripts/deps specs
	@scripts/k8s-binaries e2e
	@scripts/k8s-images specs
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd test/k8s && suite=$* && GOWORK=off SLUICE_SPECS='$(SPECS)' \
		go test -count=1 -v -timeout=180m -run "^Test$${suite^}Specs/^$(MODE)" .

.PHONY: test-k8s-policyapi
test-k8s-policyapi: k8s ## Run the conformance tests of ClusterNetworkPolicy, or those that match SPECS, in both modes of routing or in MODE (root)
	@scripts/deps specs
	@scripts/k8s-images specs
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@scripts/k8s-policyapi
	@cd test/k8s && GOWORK=off SLUICE_SPECS='$(SPECS)' go test -count=1 -v -timeout=90m -run '^TestPolicyAPI/^$(MODE)' .

.PHONY: test-k8s-cyclonus
test-k8s-cyclonus: k8s ## Run the cases of cyclonus without SCTP, or those that match SPECS, in both modes of routing or in MODE (root)
	@cd test/k8s/cyclonus && GOWORK=off CGO_ENABLED=0 go test ./...
	@cd test/k8s/cyclonus && GOWORK=off CGO_ENABLED=0 go build -trimpath -buildvcs=false -o $(CURDIR)/bin/test/ . ./probe
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd tools/ociimage && GOWORK=off go run ./cmd/ociimage -output $(CURDIR)/bin/images/cyclonus-$$(go env GOARCH).tar \
		-name sluice.io/e2e-test-images/agnhost:2.43 -architecture $$(go env GOARCH) \
		-file /agnhost=$$(readlink -f $(CURDIR)/bin/k8s/agnhost) -file /probe=$(CURDIR)/bin/test/probe -dir /tmp
	@cd test/k8s && GOWORK=off SLUICE_SPECS='$(SPECS)' go test -count=1 -v -timeout=90m -run '^TestCyclonus/^$(MODE)' .

.PHONY: test-k8s-critest
test-k8s-critest: k8s ## Run the specs of critest about networks on a node whose sandboxes no API server knows (root)
	@scripts/deps specs
	@scripts/k8s-binaries critest
	@scripts/k8s-images specs
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd test/k8s && GOWORK=off go test -count=1 -v -timeout=30m -run '^TestCritest' .

.PHONY: test-k8s-upgrade
test-k8s-upgrade: k8s ## Upgrade a cluster of one node from the images of the commit K8S_FROM (b7deab4c) to these, and one of two from K8S_NODES_FROM (b7deab4c), and back (root)
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@scripts/test-k8s-upgrade $(K8S_FROM) $(K8S_NODES_FROM)

.PHONY: test-k8s-migrate
test-k8s-migrate: k8s ## Migrate two nodes from the reference plugins and kube-proxy to Sluice (root)
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd test/k8s && GOWORK=off go test -count=1 -v -timeout=30m -run '^TestMigration$$' .

.PHONY: test-helm
test-helm: k8s ## Lint and render the chart by Helm 4 and 3, and install, upgrade, roll back and uninstall it on clusters of one node (root)
	@scripts/tools helm helm3
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd test/k8s && GOWORK=off go test -count=1 -v -timeout=30m -run '^TestHelm' .

.PHONY: test-k8s-outages
test-k8s-outages: k8s ## Stop the API server and etcd for 2 minutes each, of one node and of two in both modes (root)
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd test/k8s && GOWORK=off go test -count=1 -v -timeout=30m -run '^TestSluice(ServesACluster|ConnectsTwoNodes)$$/^(containerd_1.6|overlay|native)$$/Away$$' . -outage=2m

# Two parts of about an hour each.
k8s_shard_1 := test-k8s-netpol test-k8s-services test-k8s-critest test-k8s-outages
k8s_shard_2 := test-k8s-conformance test-k8s-policyapi test-k8s-cyclonus test-k8s-upgrade test-k8s-migrate

.PHONY: test-k8s-full
test-k8s-full: ## Run every suite on clusters, or those of SHARD=1 or SHARD=2; all of them, whatever fails (root)
	@$(MAKE) --keep-going --jobs=1 $(if $(SHARD),$(or $(k8s_shard_$(SHARD)),$(error SHARD is 1 or 2)),$(k8s_shard_1) $(k8s_shard_2))

.PHONY: bench-endpoints
bench-endpoints: ## Measure restarts, creations and deletions of the datapath alone beside up to 1,000 endpoints (root)
	@nice -n -10 go -C services/datapath test -run '^$$' -bench '^Benchmark(Restart|Life)$$' -benchtime 3x .

.PHONY: bench-paths
bench-paths: ## Compare the time that the programs take for a packet with the commit BASE, in turns (root)
	@scripts/bench-paths $(or $(BASE),$(error BASE names a commit))

.PHONY: bench-k8s
bench-k8s: k8s ## Measure bursts of pods beside ptp and portmap, changes from the API to the packet, starts and memory, on clusters (root)
	@scripts/k8s-binaries containerd containerd-shim-runc-v2 ctr
	@$(MAKE) images IMAGE=sluice.io/sluice:latest architectures=$$(go env GOARCH)
	@cd test/k8s && GOWORK=off go test -v -timeout=60m -run '^$$' -bench '^BenchmarkCluster$$' -benchtime=1x .

.PHONY: bench
bench: build ## Measure ADD, DEL, traffic, restart, memory and services beside the reference plugins, or PARTS of it: attach,traffic,nodes,lifecycle,file,cluster,services,dns,policies-30000,changes (root)
	@scripts/deps demo bench
	@go build -o bin/test/ ./test/bench ./services/identity/internal/test/simulate
	@bin/test/bench -parts=$(PARTS)

ROUNDS ?= 4
.PHONY: bench-proxy
bench-proxy: build ## Measure lookups through sluice-dns beside direct ones, by unbound, BIND and dnsmasq, in ROUNDS (4) rounds (root)
	@scripts/deps demo bench
	@go build -o bin/test/ ./test/bench
	@bin/test/bench -parts=dns -rounds=$(ROUNDS)

.PHONY: simulate
simulate: bin/sluice-identity bin/sluice-devetcd ## Run 500 nodes with 50,000 addresses on one etcd, and say what it costs; 2 minutes, no root
	@go build -o bin/test/simulate ./services/identity/internal/test/simulate
	@bin/test/simulate -bin=bin

.PHONY: check
check: ## Check format, lint, walls, generated code, and each module alone
	@scripts/deps check generate
	@scripts/tools buf golangci-lint gofumpt
	@scripts/check

.PHONY: generate
generate: ## Write generated Go and eBPF objects anew from proto/ and bpf/
	@scripts/deps generate
	@scripts/tools buf
	@scripts/generate

CHART_TAG ?=
.PHONY: chart
chart: ## Write bin/sluice-VERSION.tgz: the Helm chart of the version in the file VERSION, for images with the tag CHART_TAG
	@scripts/tools helm
	@rm -rf bin/chart
	@GOWORK=off go -C tools/chart run . -root ../.. -output $(CURDIR)/bin/chart/sluice -tag '$(CHART_TAG)'
	@bin/tools/helm package bin/chart/sluice --destination bin

.PHONY: tools
tools: ## Build the pinned tools that check and test need into bin/tools
	@scripts/tools buf cnitool gofumpt golangci-lint gotestsum grpcurl

.PHONY: modules
modules: ## Download the modules that build, check and test need
	@for module in $$(go list -m -f '{{.Dir}}') $$(grep -L '^tool ' tools/*/go.mod | xargs -n 1 dirname); do \
		GOWORK=off go -C "$$module" mod download; \
	done

.PHONY: deps
deps: ## Install the Debian packages that the other targets use (root)
	@scripts/deps

.PHONY: clean
clean: ## Remove bin/; the cache of tools stays
	rm -rf bin
