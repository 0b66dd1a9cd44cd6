// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package migrate

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/cmd/sluice/internal/policy"
)

func reportOf(t *testing.T, files ...string) *report {
	t.Helper()
	r := newReport()
	for _, file := range files {
		if err := r.read(filepath.Join("testdata", file), nil); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// lines returns findings as SETTING: TEXT, without the values.
func lines(findings []finding) (all []string) {
	for _, f := range findings {
		all = append(all, f.From+": "+f.Text)
	}
	return all
}

// requireLines requires a line for each prefix, and no further one.
func requireLines(t *testing.T, what string, findings []finding, prefixes ...string) {
	t.Helper()
	got := lines(findings)
	for _, prefix := range prefixes {
		i := slices.IndexFunc(got, func(l string) bool { return strings.HasPrefix(l, prefix) })
		if i < 0 {
			t.Errorf("%s lacks %q: %q", what, prefix, got)
			continue
		}
		got = slices.Delete(got, i, i+1)
	}
	if len(got) > 0 {
		t.Errorf("%s has further lines: %q", what, got)
	}
}

func requireValues(t *testing.T, r *report, want string) {
	t.Helper()
	got, err := yaml.Marshal(r.Values)
	if err != nil {
		t.Fatal(err)
	}
	var a, b any
	if yaml.Unmarshal(got, &a) != nil || yaml.Unmarshal([]byte(want), &b) != nil || fmt.Sprint(a) != fmt.Sprint(b) {
		t.Errorf("the values are\n%s\nwant\n%s", got, want)
	}
}

func TestConfigMapOfCiliumIsCompared(t *testing.T) {
	r := reportOf(t, "cilium-config.yaml")
	r.finish()
	requireLines(t, "missing", r.Missing, "enable-wireguard: no encryption")
	requireLines(t, "differs", r.Differs,
		"devices: settings.underlayDevices: eth*,bond0",
		"cluster-pool-ipv4-cidr: set another range", "cni-exclusive: Sluice leaves other files",
		"enable-bpf-masquerade: Sluice masquerades by nftables", "enable-l7-proxy: components.http.enabled: true",
		"identity-allocation-mode: identities are in an etcd", "ipam: ranges are spec.podCIDRs")
	requireLines(t, "works", r.Works,
		"bpf-lb-algorithm: random", "bpf-lb-mode: packets", "cluster-name: shared.cluster.name: east",
		"enable-hubble: components.hubble.enabled", "enable-ipv4: IPv4",
		"enable-ipv4-masquerade: settings.masquerade: true",
		"enable-policy: containers.policy.settings.enforcement.mode: always",
		"kube-proxy-replacement: settings.services", "policy-cidr-match-mode: shared.cluster.cidrSelectsNodes",
		"routing-mode: settings.routing: overlay", "tunnel-protocol: VXLAN")
	if want := []string{
		"agent-not-ready-taint-key", "bpf-map-dynamic-size-ratio", "cluster-pool-ipv4-mask-size",
	}; !slices.Equal(r.NotCompared, want) {
		t.Errorf("not compared are %q, want %q", r.NotCompared, want)
	}
	requireValues(t, r, `
settings: {routing: overlay, masquerade: true, services: "on", underlayDevices: ["eth*", bond0]}
shared: {cluster: {name: east, cidrSelectsNodes: true}}
components: {http: {enabled: true}, hubble: {enabled: true}}
containers: {policy: {settings: {enforcement: {mode: always}}}}
`)
}

func TestHelmValuesOfCiliumAreCompared(t *testing.T) {
	r := reportOf(t, "values.yaml")
	r.finish()
	requireLines(t, "missing", r.Missing, "bgpControlPlane.enabled: no BGP", "egressGateway.enabled: no egress gateway",
		"hubble.relay.enabled: no relay", "loadBalancer.mode: no DSR")
	requireLines(t, "differs", r.Differs, "bpf.masquerade: ", "loadBalancer.algorithm: consistent hashing only")
	if want := []string{"encryption.type", "operator.replicas"}; !slices.Equal(r.NotCompared, want) {
		t.Errorf("not compared are %q, want %q", r.NotCompared, want)
	}
	requireValues(t, r, `
settings:
  {kubernetesAPI: ["https://api.example.net:6443"], routing: native, services: "on", masqueradeExcept: [10.0.0.0/8]}
components: {hubble: {enabled: true}}
`)
}

// TestObjectsOfCiliumAreCompared: policies get the verdicts of sluice-policy, objects and annotations without effect a
// line, and objects with Cilium's own state none.
func TestObjectsOfCiliumAreCompared(t *testing.T) {
	r := reportOf(t, "objects.yaml")
	documents := 0
	for decoder := yaml.NewDecoder(strings.NewReader(string(r.policyStream()))); ; documents++ {
		var o object
		if err := decoder.Decode(&o); err != nil {
			break
		}
	}
	if documents != 2 {
		t.Fatalf("sluice-policy gets %d documents, want 2", documents)
	}
	if err := r.addPolicies([]policy.Verdict{{}}); err == nil {
		t.Error("a verdict is missing, and there is no error")
	}
	verdicts := []policy.Verdict{{}, {Unsupported: []string{"HTTP rules"}, Other: []string{"a note"}}}
	if err := r.addPolicies(verdicts); err != nil {
		t.Fatal(err)
	}
	r.finish()
	requireLines(t, "works", r.Works, "CiliumNetworkPolicy shop/web: accepted")
	requireLines(t, "differs", r.Differs, "CiliumNetworkPolicy shop/api: a note")
	requireLines(t, "missing", r.Missing, "CiliumNetworkPolicy shop/api: HTTP rules",
		"CiliumEgressGatewayPolicy out: has no effect", "Service shop/web: the annotation service.cilium.io/global")
	var b strings.Builder
	r.write(&b)
	for _, want := range []string{"Missing: 3\n", "Works unchanged: 1\n", "Values for deploy/helm/sluice:\n  {}\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, b.String())
		}
	}
}

// TestEachSettingIsComparedOnce: two rows for one setting would contradict each other, or one would never be used.
func TestEachSettingIsComparedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range settings {
		for _, name := range []string{"config " + s.config, "helm " + s.helm} {
			if seen[name] && !strings.HasSuffix(name, " ") {
				t.Errorf("%s has two rows", name)
			}
			seen[name] = true
		}
		if s.config == "" && s.helm == "" {
			t.Errorf("a row without a name")
		}
	}
	for _, value := range []string{"", "true", "false", "none", "disabled"} {
		for _, s := range settings {
			s.judge(newReport(), "x", value) // must take every value
		}
	}
}

// TestSettingsOfTheDNSProxyAreCompared: each has a setting, or a line that says why not.
func TestSettingsOfTheDNSProxyAreCompared(t *testing.T) {
	r := newReport()
	r.addConfig(object{
		"tofqdns-min-ttl": "3600", "tofqdns-idle-connection-grace-period": "30m", "tofqdns-pre-cache": "/names.json",
		"tofqdns-endpoint-max-ip-per-hostname": "5000", "tofqdns-proxy-response-max-delay": "50ms",
		"tofqdns-dns-reject-response-code": "nameError", "tofqdns-enable-dns-compression": "true", "tofqdns-proxy-port": "0",
		"tofqdns-max-deferred-connection-deletes": "10000", "tofqdns-preallocate-identities": "true",
		"dnsproxy-enable-transparent-mode": "true", "dnsproxy-concurrency-limit": "100",
		"dnsproxy-concurrency-processing-grace-period": "0s", "dnsproxy-lock-count": "131",
		"dnsproxy-lock-timeout": "500ms", "dnsproxy-socket-linger-timeout": "10",
		"dnsproxy-insecure-skip-transparent-mode-check": "false",
	})
	r.finish()
	requireLines(t, "missing", r.Missing, "tofqdns-pre-cache: no file with names is read")
	requireLines(t, "differs", r.Differs, "dnsproxy-concurrency-limit: fixed limits for each pod",
		"tofqdns-endpoint-max-ip-per-hostname: a name has 1,024 addresses at most; further")
	requireLines(t, "works", r.Works, "dnsproxy-concurrency-processing-grace-period: not needed",
		"dnsproxy-enable-transparent-mode: the server sees the address",
		"dnsproxy-insecure-skip-transparent-mode-check: not needed", "dnsproxy-lock-count: not needed",
		"dnsproxy-lock-timeout: not needed", "dnsproxy-socket-linger-timeout: not needed",
		"tofqdns-dns-reject-response-code: containers.dns.settings.refusal: nxdomain",
		"tofqdns-enable-dns-compression: not needed: answers pass unchanged",
		"tofqdns-idle-connection-grace-period: containers.policy.settings.names.grace: ",
		"tofqdns-max-deferred-connection-deletes: not needed",
		"tofqdns-min-ttl: containers.policy.settings.names.grace: 1h0m0s", "tofqdns-preallocate-identities: not needed",
		"tofqdns-proxy-port: not needed", "tofqdns-proxy-response-max-delay: containers.dns.settings.hold: 100ms")
	if len(r.NotCompared) > 0 {
		t.Errorf("not compared: %q", r.NotCompared)
	}
	requireValues(t, r, `
containers:
  policy: {settings: {names: {grace: 1h0m0s}}}
  dns: {settings: {hold: 100ms, refusal: nxdomain}}
`)
	r = newReport()
	r.addValues(object{"dnsProxy": object{
		"minTtl": 0, "idleConnectionGracePeriod": "0s", "endpointMaxIpPerHostname": 1000, "dnsRejectResponseCode": "refused",
	}})
	r.finish()
	requireLines(t, "works", r.Works, "dnsProxy.dnsRejectResponseCode: containers.dns.settings.refusal: refused",
		"dnsProxy.endpointMaxIpPerHostname: a name has 1,024 addresses at most",
		"dnsProxy.idleConnectionGracePeriod: addresses stay 10m0s", "dnsProxy.minTtl: addresses stay 10m0s")
}
