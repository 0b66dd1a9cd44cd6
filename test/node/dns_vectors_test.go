// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// fqdnVector is a pattern with names, and whether Cilium's DNS proxy matches them.
type fqdnVector struct {
	Name     string
	Manifest struct {
		MatchName    string          `json:"matchName"`
		MatchPattern string          `json:"matchPattern"`
		Matches      map[string]bool `json:"matches"`
	}
}

func fqdnVectors(t *testing.T) (list []fqdnVector) {
	t.Helper()
	f, err := os.Open("../../services/policy/testdata/policy-vectors/fqdn-match.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	plain, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(plain)
	for {
		var v fqdnVector
		if err := decoder.Decode(&v); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, v)
	}
}

// TestQueriesAreAllowedAsTheVectorsSay: for each pattern of the policy vectors, a pod sends a real query for each name.
// The server gets the queries whose names match, unchanged, and no other one.
func TestQueriesAreAllowedAsTheVectorsSay(t *testing.T) {
	t.Parallel()
	vectors := fqdnVectors(t)
	n := newNode(t)
	var apps, policies []string
	for i, v := range vectors {
		app := fmt.Sprintf("v%d", i)
		selector := fmt.Sprintf("matchPattern: %q", v.Manifest.MatchPattern)
		if v.Manifest.MatchName != "" {
			selector = fmt.Sprintf("matchName: %q", v.Manifest.MatchName)
		}
		apps = append(apps, app)
		policies = append(policies, fmt.Sprintf(`
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: %s}
spec:
  endpointSelector: {matchLabels: {app: %s}}
  egress:
  - toCIDR: [203.0.113.2/32, "2001:db8:ffff::2/128"]
    toPorts:
    - ports: [{protocol: UDP, port: "53"}]
      rules: {dns: [{%s}]}
`, app, app, selector))
	}
	pods := n.addPods(t, apps...)
	s := n.nameServer(t)
	enforce(t, n.policies(t), strings.Join(policies, "---"))
	asked := 0
	for i, v := range vectors {
		asked += s.wantVector(t, pods[i], v)
	}
	if len(vectors) != 12 || asked < 200 {
		t.Errorf("%d queries for %d patterns were sent", asked, len(vectors))
	}
	t.Logf("%d queries for %d patterns", asked, len(vectors))
}

// wantVector asks for the names of a vector, and returns their number.
func (s *nameServer) wantVector(t *testing.T, from pod.Pod, v fqdnVector) (asked int) {
	t.Helper()
	r := newResolver(t, from, netip.AddrPortFrom(s.world.IPv4, 53))
	pattern := v.Manifest.MatchPattern
	for name, want := range v.Manifest.Matches {
		full := strings.TrimSuffix(name, ".") + "."
		if strings.Contains(full, "..") {
			continue // no DNS message can contain it
		}
		if pattern == "*" || pattern == "**" {
			want = true // a rule for every name passes each query
		}
		before := s.queries(full)
		code, _, err := r.ask(full, dnsmessage.TypeTXT, 5)
		if err != nil {
			t.Fatalf("%s: %q: %v", v.Name, full, err)
		}
		asked++
		got := s.queries(full) > before
		refused := code == dnsmessage.RCodeRefused || code == dnsmessage.RCodeNameError
		if got != want || refused == want {
			t.Errorf("%s, %s%s: the query for %q has %v, and the server got it: %t; want %t", v.Name, pattern,
				v.Manifest.MatchName, full, code, got, want)
		}
	}
	return asked
}
