// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/layer7"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// ruleSets is a reader of WatchRuleSets.
type ruleSets struct {
	s      *service
	stream grpc.ServerStreamingClient[policyv1.WatchRuleSetsResponse]
	all    map[uint32]*policyv1.RuleSet
	wanted *policyv1.WantedNames
	token  []byte
}

func (s *service) watchRuleSets(token []byte) *ruleSets {
	s.t.Helper()
	stream, err := s.WatchRuleSets(s.ctx(), &policyv1.WatchRuleSetsRequest{ResumeToken: token})
	if err != nil {
		s.t.Fatal(err)
	}
	return &ruleSets{s: s, stream: stream, all: make(map[uint32]*policyv1.RuleSet)}
}

// until reads messages up to a bookmark with at least the given revision. It reports whether one of the bookmarks
// completed the listing.
func (r *ruleSets) until(revision uint64) (complete bool) {
	r.s.t.Helper()
	for {
		m, err := r.stream.Recv()
		if err != nil {
			r.s.t.Fatal(err)
		}
		if len(m.GetResumeToken()) > 0 {
			r.token = m.GetResumeToken()
		}
		switch e := m.GetEvent().(type) {
		case *policyv1.WatchRuleSetsResponse_Upsert:
			r.all[e.Upsert.GetNumber()] = e.Upsert
		case *policyv1.WatchRuleSetsResponse_WantedNames:
			r.wanted = e.WantedNames
		case *policyv1.WatchRuleSetsResponse_Delete:
			delete(r.all, e.Delete)
		case *policyv1.WatchRuleSetsResponse_Bookmark:
			complete = complete || e.Bookmark.GetSnapshotComplete()
			if e.Bookmark.GetRevision() >= revision {
				return complete
			}
		}
	}
}

// has reports whether a number has the content.
func (r *ruleSets) has(content *policyv1.RuleSet) bool {
	for n, x := range r.all {
		x = proto.CloneOf(x)
		x.Number = 0
		if n > 0 && proto.Equal(x, content) {
			return true
		}
	}
	return false
}

// one returns the only rule set, without its number.
func (r *ruleSets) one() *policyv1.RuleSet {
	r.s.t.Helper()
	if len(r.all) != 1 {
		r.s.t.Fatalf("%d rule sets, want one: %v", len(r.all), r.all)
	}
	for n, x := range r.all {
		if n == 0 || n != x.GetNumber() {
			r.s.t.Errorf("number %d in %v", n, x)
		}
		out := proto.CloneOf(x)
		out.Number = 0
		return out
	}
	return nil
}

// to returns a policy for the pods with app=db that allows parts of connections to a port.
func to(name, port, layer7 string) string {
	return fmt.Sprintf("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\n"+
		"metadata: {name: %s, namespace: shop}\nspec:\n"+
		"  endpointSelector: {matchLabels: {app: db}}\n"+
		"  egress: [{toEntities: [all], toPorts: [{ports: [{port: '%s', protocol: TCP}], %s}]}]\n", name, port, layer7)
}

func TestRuleSetsReachProxies(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.complete() // the listing ends once every source was complete
	s.watch(subscribe("datapath", 300, 301)).snapshot()
	r := s.watchRuleSets(nil)
	if !r.until(0) || len(r.all) > 0 {
		t.Fatalf("without policies: %v, and no end of the listing", r.all)
	}
	for _, c := range []struct {
		rules string
		want  *policyv1.RuleSet
	}{
		{"rules: {dns: [{matchName: API.example.com}, {matchPattern: '**.example.org'}]}", &policyv1.RuleSet{
			Proxy: netv1.Proxy_PROXY_DNS, DnsNames: []string{"**.example.org.", "api.example.com."},
		}},
		{
			"rules: {http: [{method: GET, path: '/a.*', host: b, headers: ['X-A: 1', 'X-B'], " +
				"headerMatches: [{name: X-C, value: '2', mismatch: ADD}, {name: X-D, value: '3'}]}]}",
			&policyv1.RuleSet{Proxy: netv1.Proxy_PROXY_HTTP, Http: []*policyv1.HTTPRule{{
				Method: "GET", Path: "/a.*", Host: "b",
				Headers: []*policyv1.HTTPHeader{{Name: "X-A", Value: proto.String("1")}, {Name: "X-B"}},
				HeaderMatches: []*policyv1.HTTPHeaderMatch{
					{Name: "X-C", Value: "2", Mismatch: policyv1.HeaderMismatch_HEADER_MISMATCH_ADD}, {Name: "X-D", Value: "3"},
				},
			}}},
		},
		{"serverNames: ['*.example.com']", &policyv1.RuleSet{
			Proxy: netv1.Proxy_PROXY_TLS, ServerNames: []string{"*.example.com."},
		}},
	} {
		revision := s.apply(to("a", "53", c.rules)).GetRevision()
		fresh := s.watchRuleSets(nil)
		if !fresh.until(revision) {
			t.Errorf("%s: the listing has no end", c.rules)
		}
		r.until(revision)
		if !r.has(c.want) {
			t.Errorf("%s: rule sets %v, want %v", c.rules, r.all, c.want)
		}
	}
	// A second policy leads to a union, and an allow rule to a set that allows everything.
	r.until(s.apply(to("b", "53", "serverNames: ['b.test']")).GetRevision())
	union := &policyv1.RuleSet{Proxy: netv1.Proxy_PROXY_TLS, ServerNames: []string{"*.example.com.", "b.test."}}
	if !r.has(union) {
		t.Errorf("rule sets %v, want %v", r.all, union)
	}
	r.until(s.apply("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: b, namespace: shop}\nspec:\n" +
		"  endpointSelector: {matchLabels: {app: db}}\n  egress: [{toEntities: [all]}]\n").GetRevision())
	if all := (&policyv1.RuleSet{Proxy: netv1.Proxy_PROXY_TLS, All: true}); !r.has(all) {
		t.Errorf("rule sets %v, want %v", r.all, all)
	}
}

// TestWatchOfRuleSetsContinues: a reader that reconnects gets only the changes that it missed. In another run of the
// service, it gets all sets.
func TestWatchOfRuleSetsContinues(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.complete() // the listing ends once every source was complete
	s.watch(subscribe("datapath", 300, 301)).snapshot()
	r := s.watchRuleSets(nil)
	r.until(s.apply(to("a", "53", "rules: {dns: [{matchName: a}]}")).GetRevision())
	before := r.one()
	revision := s.apply(to("b", "5353", "rules: {dns: [{matchName: b}]}")).GetRevision()
	again := s.watchRuleSets(r.token)
	if again.until(revision) {
		t.Error("a continued watch lists everything")
	}
	if got := again.one().GetDnsNames(); len(got) != 1 || got[0] != "b." {
		t.Errorf("after the token: %v, want only b", got)
	}
	s.stop()
	s.start()
	stream, err := s.WatchRuleSets(s.ctx(), &policyv1.WatchRuleSetsRequest{ResumeToken: r.token})
	if err == nil {
		_, err = stream.Recv()
	}
	wantCode(t, err, codes.OutOfRange, "")
	s.know(town)
	s.watch(subscribe("datapath", 300, 301)).snapshot()
	other := s.watchRuleSets(nil)
	other.until(revision)
	for n, x := range r.all {
		if got := other.all[n]; !proto.Equal(got, x) || !proto.Equal(before, r.one()) {
			t.Errorf("after a restart number %d is %v, want %v", n, got, x)
		}
	}
}

// TestNamesThatTablesSelectReachProxies: proxies receive the names that tables select, so that they need not learn
// addresses of other names.
func TestNamesThatTablesSelectReachProxies(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.complete() // the listing ends once every source was complete
	s.watch(subscribe("datapath", 300, 301)).snapshot()
	r := s.watchRuleSets(nil)
	if r.until(0); r.wanted == nil || r.wanted.GetAll() || len(r.wanted.GetDnsNames()) > 0 {
		t.Fatalf("without policies, %v is wanted", r.wanted)
	}
	names := func(name, app, list string) string {
		return fmt.Sprintf("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\n"+
			"metadata: {name: %s, namespace: shop}\nspec:\n"+
			"  endpointSelector: {matchLabels: {app: %s}}\n  egress: [{toFQDNs: [%s]}]\n", name, app, list)
	}
	want := func(what string, names ...string) {
		t.Helper()
		if got := r.wanted.GetDnsNames(); !slices.Equal(got, names) || r.wanted.GetAll() {
			t.Errorf("%s: %v is wanted, want %v", what, r.wanted, names)
		}
	}
	r.until(s.apply(names("a", "db", "{matchName: B.example}, {matchPattern: '**.a.example'}")).GetRevision())
	want("a policy", "**.a.example.", "b.example.")
	r.until(s.apply(names("elsewhere", "absent", "{matchName: c.example}")).GetRevision())
	want("a policy without local pods", "**.a.example.", "b.example.")
	r.until(s.apply(names("b", "db", "{matchName: b.example}, {matchName: d.example}")).GetRevision())
	want("a second policy", "**.a.example.", "b.example.", "d.example.")
	r.until(s.apply(names("a", "db", "{matchName: e.example}")).GetRevision())
	want("a changed policy", "b.example.", "d.example.", "e.example.")
	list := make([]string, layer7.MaxEntries+1)
	for i := range list {
		list[i] = fmt.Sprintf("{matchName: n%d.example}", i)
	}
	if r.until(s.apply(names("a", "db", strings.Join(list, ", "))).GetRevision()); !r.wanted.GetAll() {
		t.Errorf("%d patterns in a message, want all names", len(r.wanted.GetDnsNames()))
	}
}

// TestMismatchesHaveTheirNumbers: the mismatch actions have the same numbers as in the API.
func TestMismatchesHaveTheirNumbers(t *testing.T) {
	for m, want := range map[layer7.Mismatch]policyv1.HeaderMismatch{
		layer7.Refuse:  policyv1.HeaderMismatch_HEADER_MISMATCH_UNSPECIFIED,
		layer7.Log:     policyv1.HeaderMismatch_HEADER_MISMATCH_LOG,
		layer7.Add:     policyv1.HeaderMismatch_HEADER_MISMATCH_ADD,
		layer7.Delete:  policyv1.HeaderMismatch_HEADER_MISMATCH_DELETE,
		layer7.Replace: policyv1.HeaderMismatch_HEADER_MISMATCH_REPLACE,
	} {
		if got := policyv1.HeaderMismatch(m); got != want {
			t.Errorf("%s is %s, want %s", m, got, want)
		}
	}
}
