// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/reasontest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// service is the real server on a real socket.
type service struct {
	policyv1.PolicyServiceClient
	shares  sharesv1.SharesServiceClient
	t       *testing.T
	owner   *owner.Owner
	dir     string
	state   string
	stop    func()
	end     func()         // ends the owner but not the server
	runs    func(f func()) // nil: the owner runs in an ordinary goroutine
	sources []string       // in addition to the identities
	cluster addresses
}

// addresses maps addresses of a cluster to identities. While down is set, it returns peer.ErrUnresolved.
type addresses struct {
	known map[string]identity.Numeric
	away  bool
}

func (a *addresses) IdentityOf(_ context.Context, x netip.Addr) (identity.Numeric, error) {
	if a.away {
		return 0, peer.ErrUnresolved
	}
	return a.known[x.String()], nil
}

type option func(*owner.Config)

func serve(t *testing.T, opts ...option) *service {
	t.Helper()
	s := prepare(t)
	s.start(opts...)
	t.Cleanup(func() { s.stop() })
	return s
}

// prepare creates the directories of a server.
func prepare(t *testing.T) *service {
	t.Helper()
	dir, err := os.MkdirTemp("", "policy-") // short enough for a socket's address
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &service{t: t, dir: dir, state: filepath.Join(dir, "state")}
	if err := os.Mkdir(s.state, 0o750); err != nil {
		t.Fatal(err)
	}
	return s
}

// start serves from the state directory.
func (s *service) start(opts ...option) {
	s.t.Helper()
	cfg := owner.Config{
		Engine:      engine.Config{Cluster: "default", AllowHost: true},
		MaxPolicies: 1000, MaxManifestBytes: 64 << 20, MaxNames: 4, MaxAddresses: 16, NameGrace: time.Minute,
		Linger: time.Minute, Stream: stream.Defaults(), Log: log.Discard(),
	}
	cfg.Rules.Cluster = "default"
	for _, o := range opts {
		o(&cfg)
	}
	o, err := owner.New(cfg, s.state, append([]string{source.Identity}, s.sources...))
	if err != nil {
		s.t.Fatal(err)
	}
	impl := &Server{Owner: o, Version: "test", Started: time.Now(), Addresses: &s.cluster}
	srv, err := rpc.NewServer(rpc.Options{Register: impl.Register, Methods: Methods(), AlsoRoot: []uint32{uint32(os.Getuid())}})
	if err != nil {
		s.t.Fatal(err)
	}
	socket := filepath.Join(s.dir, "s")
	l, err := rpc.Listen(socket, rpc.ListenOptions{Mode: 0o666})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg, running sync.WaitGroup
	run := func() {
		if err := o.Run(ctx); err != nil {
			s.t.Errorf("owner: %v", err)
		}
	}
	running.Go(func() {
		if s.runs != nil {
			s.runs(run)
			return
		}
		run()
	})
	s.end = func() {
		cancel()
		running.Wait()
	}
	wg.Go(func() {
		if err := srv.Serve(l); err != nil {
			s.t.Errorf("serve: %v", err)
		}
	})
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.PolicyServiceClient = policyv1.NewPolicyServiceClient(reasontest.Record(conn))
	s.shares = sharesv1.NewSharesServiceClient(conn)
	s.owner = o
	s.stop = sync.OnceFunc(func() {
		conn.Close()
		srv.Stop()
		s.end()
		wg.Wait()
		if err := o.Close(); err != nil {
			s.t.Errorf("close: %v", err)
		}
	})
}

func (s *service) ctx() context.Context { return servicetest.Context(s.t) }

// know adds identities to the owner: numbers with labels as "source:key=value".
func (s *service) know(ids map[uint32]string) {
	s.t.Helper()
	if err := s.owner.Identities().SetIdentities(s.ctx(), identitiesOf(s.t, ids), nil); err != nil {
		s.t.Fatal(err)
	}
}

func identitiesOf(t *testing.T, ids map[uint32]string) []peer.Identity {
	t.Helper()
	var out []peer.Identity
	for n, text := range ids {
		var labels []label.Label
		for _, l := range strings.Fields(text) {
			source, rest, _ := strings.Cut(l, ":")
			key, value, _ := strings.Cut(rest, "=")
			labels = append(labels, label.Label{Source: source, Key: key, Value: value})
		}
		id, err := peer.New(identity.Numeric(n), label.NewSet(labels...))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, id)
	}
	return out
}

const namespaceLabel = "k8s:io.kubernetes.pod.namespace="

// town are two pods, the host and the world.
var town = map[uint32]string{
	1:   "reserved:host=",
	9:   "reserved:world-ipv4=",
	10:  "reserved:world-ipv6=",
	300: "k8s:app=web " + namespaceLabel + "shop",
	301: "k8s:app=db " + namespaceLabel + "shop",
	302: "k8s:app=other " + namespaceLabel + "shop",
}

// allowWeb allows web to connect to db on port 5432.
const allowWeb = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: web}}}]
    ports: [{protocol: TCP, port: 5432}]
`

func named(name, manifest string) string {
	return strings.Replace(manifest, "name: db", "name: "+name, 1)
}

func (s *service) apply(manifests string) *policyv1.UpsertPoliciesResponse {
	s.t.Helper()
	out, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(manifests)})
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

func (s *service) list() map[string]*policyv1.Policy {
	s.t.Helper()
	stream, err := s.ListPolicies(s.ctx(), &policyv1.ListPoliciesRequest{WithManifests: true})
	if err != nil {
		s.t.Fatal(err)
	}
	out := map[string]*policyv1.Policy{}
	for {
		m, err := stream.Recv()
		if err != nil {
			if err.Error() != "EOF" {
				s.t.Fatal(err)
			}
			return out
		}
		out[m.GetPolicy().GetKey().GetName()] = m.GetPolicy()
	}
}

func wantCode(t *testing.T, err error, code codes.Code, text string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), text) {
		t.Errorf("got %v, want %s with %q", err, code, text)
	}
}

// TestUpsertIsAllOrNothingAndRepeatable proves INV-40, INV-60.
func TestUpsertIsAllOrNothingAndRepeatable(t *testing.T) {
	s := serve(t)
	s.know(town)
	both := allowWeb + "---\n" + named("db2", allowWeb)
	first := s.apply(both)
	if first.GetRevision() != 1 || len(first.GetChanges()) != 2 || first.GetChanges()[0].GetType() != policyv1.ChangeType_CHANGE_TYPE_CREATED {
		t.Fatalf("first: %v", first)
	}
	again := s.apply(both)
	if again.GetRevision() != 1 || again.GetChanges()[1].GetType() != policyv1.ChangeType_CHANGE_TYPE_UNCHANGED {
		t.Errorf("the same again: %v", again)
	}
	bad := named("db3", allowWeb) + "---\n" + strings.Replace(allowWeb, "5432", "123456", 1)
	_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(bad)})
	wantCode(t, err, codes.InvalidArgument, "document 2 (line 10): NetworkPolicy shop/db: spec.ingress[0].ports[0].port")
	var fields []string
	for _, d := range status.Convert(err).Details() {
		if br, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range br.GetFieldViolations() {
				fields = append(fields, v.GetField())
			}
		}
	}
	if !slices.Equal(fields, []string{"manifests[1].spec.ingress[0].ports[0].port"}) {
		t.Errorf("fields: %q", fields)
	}
	if got := s.list(); len(got) != 2 || got["db3"] != nil {
		t.Errorf("after the invalid one there are %v", got)
	}
	replaced := s.apply(strings.Replace(allowWeb, "5432", "5433", 1))
	if replaced.GetRevision() != 2 || replaced.GetChanges()[0].GetType() != policyv1.ChangeType_CHANGE_TYPE_REPLACED {
		t.Errorf("replaced: %v", replaced)
	}
	p := s.list()["db"]
	if p.GetRevision() != 2 || p.GetRules() != 2 || !p.GetAccepted() || !strings.Contains(string(p.GetManifest()), "5433") || strings.Contains(string(p.GetManifest()), "---") {
		t.Errorf("listed: %v", p)
	}
}

func TestExplainNamesTheRuleAndItsText(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb)
	x, err := s.Explain(s.ctx(), &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: 300}, To: &policyv1.Peer{Identity: 301}, Protocol: 6, Port: 5432})
	if err != nil {
		t.Fatal(err)
	}
	in := x.GetIngress()
	if x.GetVerdict() != policyv1.Action_ACTION_ALLOW || in.GetDecidedBy() != netv1.DecidedBy_DECIDED_BY_RULE || x.GetEgress().GetEnforced() {
		t.Fatalf("explained: %v", x)
	}
	m := in.GetMatches()[0]
	if !m.GetDecides() || m.GetSources()[0].GetPath() != "spec.ingress[0]" || m.GetText() != `allow from {k8s:app In "web", k8s:io.kubernetes.pod.namespace In "shop"} on TCP/5432` {
		t.Errorf("match: %v", m)
	}
	// The labels need not belong to an identity. An address without labels belongs to the world.
	for _, c := range []struct {
		from *policyv1.Peer
		want policyv1.Action
	}{
		{&policyv1.Peer{Labels: []*workloadv1.Label{{Source: "k8s", Key: "app", Value: "web"}, {Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "shop"}, {Source: "k8s", Key: "new", Value: "1"}}}, policyv1.Action_ACTION_ALLOW},
		{&policyv1.Peer{Labels: []*workloadv1.Label{{Source: "k8s", Key: "app", Value: "stranger"}}}, policyv1.Action_ACTION_DENY},
		{&policyv1.Peer{Address: "1.2.3.4"}, policyv1.Action_ACTION_DENY},
		{&policyv1.Peer{Identity: 1}, policyv1.Action_ACTION_ALLOW},
	} {
		x, err := s.Explain(s.ctx(), &policyv1.ExplainRequest{From: c.from, To: &policyv1.Peer{Identity: 301}, Protocol: 6, Port: 5432})
		if err != nil || x.GetVerdict() != c.want {
			t.Errorf("from %v: %v, %v, want %s", c.from, x, err, c.want)
		}
		if (c.from.GetAddress() != "") != (x.GetEgress() == nil) {
			t.Errorf("from %v: the sender's side is %v", c.from, x.GetEgress())
		}
	}
	_, err = s.Explain(s.ctx(), &policyv1.ExplainRequest{From: &policyv1.Peer{}, To: &policyv1.Peer{Identity: 301}, Protocol: 6})
	wantCode(t, err, codes.InvalidArgument, "from: neither identity, labels nor address")
	_, err = s.Explain(s.ctx(), &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: 77}, To: &policyv1.Peer{Identity: 301}, Protocol: 6})
	wantCode(t, err, codes.NotFound, "identity 77")
}

func TestQueryIsExplained(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(`apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: names, namespace: shop}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: [1.2.3.4/32]
    toPorts:
    - ports: [{port: "53", protocol: UDP}]
      rules: {dns: [{matchName: api.example.com}]}
  - toFQDNs: [{matchPattern: "*.example.com"}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
`)
	learn := &policyv1.LearnNamesRequest{Name: "api.example.com", Addresses: []string{"192.0.2.7"}}
	if _, err := s.LearnNames(s.ctx(), learn); err != nil {
		t.Fatal(err)
	}
	explain := func(name string) (*policyv1.ExplainResponse, error) {
		return s.Explain(s.ctx(), &policyv1.ExplainRequest{
			From: &policyv1.Peer{Identity: 300}, To: &policyv1.Peer{Address: "1.2.3.4"}, Protocol: 17, Port: 53, DnsName: name,
		})
	}
	for name, want := range map[string]policyv1.QueryOutcome{
		"API.example.com": policyv1.QueryOutcome_QUERY_OUTCOME_ALLOWED,
		"b.example.com.":  policyv1.QueryOutcome_QUERY_OUTCOME_REFUSED,
	} {
		x, err := explain(name)
		if err != nil {
			t.Fatal(err)
		}
		m, d := x.GetEgress().GetMatches(), x.GetDns()
		allowed := want == policyv1.QueryOutcome_QUERY_OUTCOME_ALLOWED
		if d.GetOutcome() != want || len(m) != 1 || m[0].AllowsName == nil || m[0].GetAllowsName() != allowed ||
			len(d.GetRules()) != 1 || d.GetRules()[0].GetSources()[0].GetPath() != "spec.egress[1].toPorts[0]" ||
			(len(d.GetAddresses()) == 1) != allowed {
			t.Errorf("%s: %v", name, x)
		}
		if allowed && d.GetAddresses()[0].GetPorts()[0] != "TCP/443" {
			t.Errorf("%s: ports %v", name, d.GetAddresses())
		}
	}
	if x, err := explain(""); err != nil || x.GetDns() != nil || x.GetEgress().GetMatches()[0].AllowsName != nil {
		t.Errorf("without a name: %v, %v", x, err)
	}
	_, err := explain("a b")
	wantCode(t, err, codes.InvalidArgument, "dns_name")
}

// TestExplainTakesAnAddressForTheIdentityThatItHasInTheCluster explains connections between two addresses. Explain
// resolves them to identities of the cluster. While sluice-identity is unavailable, it returns an error.
func TestExplainTakesAnAddressForTheIdentityThatItHasInTheCluster(t *testing.T) {
	s := serve(t)
	known := maps.Clone(town)
	known[uint32(identity.UnknownInCluster)] = "reserved:unknown-in-cluster="
	s.know(known)
	s.apply(allowWeb)
	s.cluster.known = map[string]identity.Numeric{
		"10.244.1.2": 300, "10.244.1.3": 301, "10.244.1.9": identity.UnknownInCluster,
	}
	explain := func(from, to string) (*policyv1.ExplainResponse, error) {
		return s.Explain(s.ctx(), &policyv1.ExplainRequest{
			From: &policyv1.Peer{Address: from}, To: &policyv1.Peer{Address: to}, Protocol: 6, Port: 5432,
		})
	}
	for _, c := range []struct {
		from string
		peer uint32
		want policyv1.Action
	}{
		{"10.244.1.2", 300, policyv1.Action_ACTION_ALLOW},
		{"10.244.1.9", uint32(identity.UnknownInCluster), policyv1.Action_ACTION_DENY},
		{"192.0.2.1", uint32(identity.WorldIPv4), policyv1.Action_ACTION_DENY},
	} {
		x, err := explain(c.from, "10.244.1.3")
		if err != nil || x.GetVerdict() != c.want || x.GetIngress().GetPeer() != c.peer ||
			x.GetIngress().GetSubject() != 301 {
			t.Errorf("from %s: %v, %v; want %s of peer %d", c.from, x, err, c.want, c.peer)
		}
	}
	if x, err := explain("10.244.1.2", "192.0.2.1"); err != nil || x.GetEgress().GetSubject() != 300 {
		t.Errorf("to the world: %v, %v", x, err)
	}
	s.cluster.away = true
	for _, ends := range [][2]string{{"10.244.1.2", "10.244.1.3"}, {"192.0.2.1", "10.244.1.3"}} {
		_, err := explain(ends[0], ends[1])
		wantCode(t, err, codes.Unavailable,
			"from.address "+ends[0]+": sluice-identity cannot resolve the address to an identity")
	}
	x, err := s.Explain(s.ctx(), &policyv1.ExplainRequest{
		From: &policyv1.Peer{Identity: 300, Address: "10.244.1.2"}, To: &policyv1.Peer{Identity: 301}, Protocol: 6,
		Port: 5432,
	})
	if err != nil || x.GetVerdict() != policyv1.Action_ACTION_ALLOW {
		t.Errorf("with identities sluice-identity is not asked: %v, %v", x, err)
	}
}

func TestSharesAreThoseOfTheNamespaces(t *testing.T) {
	s := serve(t)
	if _, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(allowWeb)}); err != nil {
		t.Fatal(err)
	}
	stream, err := s.shares.ListShares(s.ctx(), &sharesv1.ListSharesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range m.GetTenants() {
			if x.GetName() == "" {
				continue // not divided among tenants
			}
			got = append(got, fmt.Sprintf("%s of %s: all admitted %t",
				m.GetLimit().GetName(), x.GetName(), x.GetAdmitted() == x.GetAsked()))
		}
	}
	want := []string{"policies of shop: all admitted true", "manifests of shop: all admitted true"}
	if !slices.Equal(got, want) {
		t.Errorf("shares %q, want %q", got, want)
	}
}
