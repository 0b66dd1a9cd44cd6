// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package model

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// vector is a case of the policy vectors. The README of the vectors describes the format.
type vector struct {
	Name    string          `json:"name"`
	Kind    string          `json:"kind"`
	Config  json.RawMessage `json:"config"`
	Cluster struct {
		Namespaces []*vectorNamespace `json:"namespaces"`
		Pods       []*vectorPod       `json:"pods"`
		Nodes      []struct {
			Name          string       `json:"name"`
			IPs           []netip.Addr `json:"ips"`
			KubeAPIServer bool         `json:"kubeApiserver"`
		} `json:"nodes"`
		Externals []struct {
			IP            netip.Addr `json:"ip"`
			KubeAPIServer bool       `json:"kubeApiserver"`
		} `json:"externals"`
	} `json:"cluster"`
	Steps []*vectorStep `json:"steps"`
}

type vectorNamespace struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels"`
}

type vectorPod struct {
	Namespace string            `json:"namespace"`
	Name      string            `json:"name"`
	Labels    map[string]string `json:"labels"`
	IPs       []netip.Addr      `json:"ips"`
	Node      string            `json:"node"`
	Cluster   string            `json:"cluster"`
	State     string            `json:"state"`
	Ports     []struct {
		Name  string          `json:"name"`
		Port  uint16          `json:"port"`
		Proto corev1.Protocol `json:"proto"`
	} `json:"ports"`
}

type vectorStep struct {
	Apply  []json.RawMessage `json:"apply"`
	Probes []struct {
		From     string          `json:"from"`
		Loopback bool            `json:"loopback"`
		To       string          `json:"to"`
		Proto    corev1.Protocol `json:"proto"`
		Port     uint16          `json:"port"`
		Egress   string          `json:"egress"`
		Ingress  string          `json:"ingress"`
	} `json:"probes"`
}

// strictly unmarshals JSON and rejects unknown fields.
func strictly(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// knows returns the first step of a case and its policies. It is false if they contain a field or value that the model
// does not implement.
func (v *vector) knows() (p Policies, s *vectorStep, ok bool) {
	if len(v.Config) > 0 || strings.HasPrefix(v.Name, "cnp-config-") {
		return p, s, false
	}
	s = v.Steps[0]
	for _, text := range s.Apply {
		// The model implements no label sources but the one of podNamespace.
		bare := strings.ReplaceAll(string(text), podNamespace, "")
		if strings.Contains(bare, `reserved`) || strings.Contains(bare, `:io.`) || strings.Contains(bare, `any:`) ||
			strings.Contains(bare, `k8s:`) || strings.Contains(bare, `"io.`) {
			return p, s, false
		}
		var n networkingv1.NetworkPolicy
		var c CiliumNetworkPolicy
		switch {
		case bytes.Contains(text, []byte(`"NetworkPolicy"`)) && strictly(text, &n) == nil:
			p.Network = append(p.Network, n)
		case bytes.Contains(text, []byte(`"CiliumNetworkPolicy"`)) && strictly(text, &c) == nil && c.Spec.isKnown():
			p.Cilium = append(p.Cilium, c)
		default:
			return p, s, false
		}
	}
	return p, s, true
}

// isKnown reports whether the model implements all entities and ICMP types of the policy.
func (s *CiliumSpec) isKnown() bool {
	known := []string{
		entityAll, entityWorld, entityCluster, entityHost, entityRemoteNode, entityUnmanaged, entityHealth,
	}
	for _, rules := range [][]CiliumRule{s.Ingress, s.IngressDeny, s.Egress, s.EgressDeny} {
		for _, r := range rules {
			for _, e := range slices.Concat(r.FromEntities, r.ToEntities) {
				if !slices.Contains(known, e) {
					return false
				}
			}
			for _, f := range slices.Concat(r.ICMPs) {
				for _, field := range f.Fields {
					if _, ok := typesOfICMP["IPv4"][field.Type.StrVal]; field.Type.StrVal != "" && !ok {
						return false
					}
				}
			}
		}
	}
	return true
}

// addressOf returns the IPv4 address, which is the first, or the IPv6 address.
func addressOf(all []netip.Addr, v6 bool) netip.Addr {
	if v6 {
		return all[1]
	}
	return all[0]
}

// end returns one end of a probe as the peer of a subject on a node. Pods are subjects, too.
func (v *vector) end(name, node string, v6 bool) (peer Peer, subject *Subject, at string, ok bool) {
	kind, name, _ := strings.Cut(name, ":")
	switch kind {
	case "pod":
		for _, p := range v.Cluster.Pods {
			if p.Namespace+"/"+p.Name != name || p.Cluster != "" || p.State != "" || len(p.IPs) < 2 && v6 {
				continue
			}
			peer = Peer{Kind: PodPeer, Namespace: p.Namespace, Labels: p.Labels, Address: addressOf(p.IPs, v6)}
			for _, n := range v.Cluster.Namespaces {
				if n.Name == p.Namespace {
					peer.NamespaceLabels = n.Labels
				}
			}
			for _, port := range p.Ports {
				peer.Ports = append(peer.Ports, NamedPort{port.Name, port.Proto, port.Port})
			}
			return peer, &Subject{Namespace: p.Namespace, Labels: p.Labels, Ports: peer.Ports}, p.Node, true
		}
	case "ip":
		a, err := netip.ParseAddr(name)
		for _, e := range v.Cluster.Externals {
			ok = ok || e.IP == a && e.KubeAPIServer
		}
		return Peer{Kind: Outside, Address: a}, nil, "", err == nil && !ok
	case "node":
		for _, n := range v.Cluster.Nodes {
			if n.Name != name || n.KubeAPIServer || len(n.IPs) < 2 && v6 {
				continue
			}
			peer = Peer{Kind: RemoteNode, Address: addressOf(n.IPs, v6)}
			if n.Name == node {
				peer.Kind = HostPeer
			}
			return peer, nil, n.Name, true
		}
	}
	return peer, nil, "", false
}

// TestModelAnswersAsTheVectors compares the model with the verdicts of other policy engines, for all vectors whose
// policies the model implements completely.
func TestModelAnswersAsTheVectors(t *testing.T) {
	t.Parallel()
	for file, least := range map[string]int{"np-cyclonus": 90_000, "np-fuzz": 200_000, "cnp": 30_000} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			f, err := os.Open(filepath.Join("testdata", "policy-vectors", file+".jsonl.gz"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			z, err := gzip.NewReader(f)
			if err != nil {
				t.Fatal(err)
			}
			cases, verdicts := 0, 0
			lines := bufio.NewScanner(z)
			for lines.Buffer(nil, 1<<26); lines.Scan(); {
				var v vector
				if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
					t.Fatal(err)
				}
				if p, s, ok := v.knows(); ok {
					cases++
					verdicts += v.compare(t, &p, s)
				}
			}
			if err := lines.Err(); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d cases, %d verdicts", cases, verdicts)
			if verdicts < least {
				t.Errorf("compared %d verdicts, want >= %d", verdicts, least)
			}
		})
	}
}

func (v *vector) compare(t *testing.T, p *Policies, s *vectorStep) (verdicts int) {
	t.Helper()
	for _, q := range s.Probes {
		if q.Loopback {
			continue
		}
		v6 := q.Proto == ICMPv6 || strings.Count(q.From+q.To, ":") > 3
		_, sender, sends, _ := v.end(q.From, "", v6)
		_, receiver, receives, _ := v.end(q.To, "", v6)
		from, _, _, ok1 := v.end(q.From, receives, v6)
		to, _, _, ok2 := v.end(q.To, sends, v6)
		if !ok1 || !ok2 {
			continue
		}
		check := func(d Direction, subject *Subject, peer Peer, want string) {
			if subject == nil || want == "" {
				return
			}
			verdicts++
			if got := p.Allows(d, *subject, peer, q.Proto, q.Port); got != (want == "allow") {
				t.Errorf("%s: %s of %s to %s, %s %d: the model allows: %t, the vector says %s", v.Name, d, q.From, q.To, q.Proto,
					q.Port, got, want)
			}
		}
		check(Egress, sender, to, q.Egress)
		check(Ingress, receiver, from, q.Ingress)
	}
	return verdicts
}
