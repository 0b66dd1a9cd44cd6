// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// running is the real server on a real socket.
type running struct {
	lbv1.LoadBalancerServiceClient
	t      *testing.T
	owner  *owner.Owner
	shares sharesv1.SharesServiceClient
	stop   context.CancelFunc // ends the owner's loop
}

func serve(t *testing.T) *running {
	t.Helper()
	return serveIn(t, stateDir(t))
}

// stateDir is short enough for a socket's address.
func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lb-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// serveIn serves until the end of the test, with an existing state.
func serveIn(t *testing.T, dir string) *running {
	t.Helper()
	o, err := owner.New(owner.Config{
		Node:   compile.Node{Name: "here"},
		Limits: owner.Limits{Services: 100, Slices: 100, Frontends: 3000, Backends: 1000, BackendsPerService: 100},
		Linger: time.Minute, Log: log.Discard(),
	}, filepath.Join(dir, "state"), nil)
	if err != nil {
		t.Fatal(err)
	}
	impl := &Server{Owner: o, Version: "test", Started: time.Now()}
	srv, err := rpc.NewServer(rpc.Options{
		Register: impl.Register, Methods: Methods(),
		AlsoRoot: []uint32{uint32(os.Getuid())},
	})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	l, err := rpc.Listen(socket, rpc.ListenOptions{Mode: 0o666})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran, served := make(chan error, 1), make(chan error, 1)
	go func() { ran <- o.Run(ctx) }()
	go func() { served <- srv.Serve(l) }()
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		srv.Stop()
		<-served
		cancel()
		if err := errors.Join(<-ran, o.Close()); err != nil {
			t.Error(err)
		}
	})
	return &running{lbv1.NewLoadBalancerServiceClient(conn), t, o, sharesv1.NewSharesServiceClient(conn), cancel}
}

func (r *running) ctx() context.Context { return servicetest.Context(r.t) }

func (r *running) apply(text string) *lbv1.UpsertServicesResponse {
	r.t.Helper()
	out, err := r.UpsertServices(r.ctx(), &lbv1.UpsertServicesRequest{Manifests: []byte(text)})
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

const web = `apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.1
  externalTrafficPolicy: Local
  sessionAffinity: ClientIP
  loadBalancerSourceRanges: [192.0.2.0/24]
  ports: [{name: http, port: 80, nodePort: 30080}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.0.0.1], nodeName: here}
- {addresses: [10.0.0.2], nodeName: there}
- {addresses: [10.0.0.3], conditions: {ready: false, serving: false}}
`

func TestServiceIsShownWithItsFrontends(t *testing.T) {
	r := serve(t)
	r.apply(web)
	got, err := r.GetService(r.ctx(), &lbv1.GetServiceRequest{Namespace: "shop", Name: "web"})
	if err != nil {
		t.Fatal(err)
	}
	s := got.GetService()
	if s.GetType() != "LoadBalancer" || s.GetSource() != "grpc" || s.GetReady() != 2 || s.GetEndpoints() != 3 ||
		s.GetRevision() != 1 || got.GetRevision() != 1 ||
		!slices.Equal(s.GetAddresses(), []string{"10.96.0.1", "203.0.113.1"}) || s.GetPorts()[0].GetNodePort() != 30080 ||
		s.GetEnforced() {
		t.Errorf("the service is %v", s)
	}
	var lines []string
	for _, f := range s.GetFrontends() {
		line := fmt.Sprintf("%s %q:%d %s affinity %d ranges %v", f.GetKind(), f.GetKey().GetAddress(),
			f.GetKey().GetPort(), f.GetKey().GetFamily(), f.GetAffinitySeconds(), f.GetSourceRanges())
		for _, l := range []*lbv1.BackendList{f.GetInside(), f.GetOutside()} {
			line += " |"
			for _, b := range l.GetBackends() {
				line += fmt.Sprintf(" %s:%d", b.GetAddress(), b.GetPort())
			}
			for _, b := range l.GetDraining() {
				line += fmt.Sprintf(" draining %s:%d %t", b.GetAddress(), b.GetPort(), b.GetTerminating())
			}
		}
		lines = append(lines, strings.ReplaceAll(line, "FRONTEND_KIND_", ""))
	}
	want := []string{
		`CLUSTER_IP "10.96.0.1":80 IP_FAMILY_UNSPECIFIED affinity 10800 ranges [] | 10.0.0.1:8080 10.0.0.2:8080 |`,
		`NODE_PORT "":30080 IP_FAMILY_IPV4 affinity 10800 ranges [] ` +
			`| 10.0.0.1:8080 10.0.0.2:8080 | 10.0.0.1:8080 draining 10.0.0.2:8080 false`,
		`LOAD_BALANCER "203.0.113.1":80 IP_FAMILY_UNSPECIFIED affinity 10800 ranges [192.0.2.0/24] ` +
			`| 10.0.0.1:8080 10.0.0.2:8080 | 10.0.0.1:8080 draining 10.0.0.2:8080 false`,
	}
	if !slices.Equal(lines, want) {
		t.Errorf("the frontends are\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
}

// TestServiceAsksForATableByAnAnnotation: when the annotation is added, the service is replaced, and each list of
// each frontend has the algorithm.
func TestServiceAsksForATableByAnAnnotation(t *testing.T) {
	r := serve(t)
	r.apply(web)
	want := lbv1.Algorithm_ALGORITHM_UNSPECIFIED
	for range 2 {
		got, err := r.GetService(r.ctx(), &lbv1.GetServiceRequest{Namespace: "shop", Name: "web"})
		if err != nil {
			t.Fatal(err)
		}
		if a := got.GetService().GetAlgorithm(); a != want {
			t.Errorf("the service has %v, want %v", a, want)
		}
		for _, f := range got.GetService().GetFrontends() {
			for _, l := range []*lbv1.BackendList{f.GetInside(), f.GetOutside()} {
				if l != nil && l.GetAlgorithm() != want {
					t.Errorf("a list of %v has %v, want %v", f.GetKey(), l.GetAlgorithm(), want)
				}
			}
		}
		r.apply(strings.Replace(web, "metadata: {name: web, namespace: shop}",
			"metadata: {name: web, namespace: shop, annotations: {sluice.io/load-balancing-algorithm: table}}", 1))
		want = lbv1.Algorithm_ALGORITHM_TABLE
	}
}

func TestListTakesFiltersAndNamesWhatIsRefused(t *testing.T) {
	r := serve(t)
	r.apply(web)
	r.apply("apiVersion: v1\nkind: Service\nmetadata: {name: none}\nspec: {clusterIP: None}\n---\n" +
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: lost, labels: " +
		"{kubernetes.io/service-name: gone}}\naddressType: IPv4\nendpoints: []\n")
	none, other := "", "other"
	for _, c := range []struct {
		what string
		req  *lbv1.ListServicesRequest
		want string
	}{
		{"all", &lbv1.ListServicesRequest{}, "default/none Headless 0, shop/web LoadBalancer 0, !default/lost"},
		{"a namespace", &lbv1.ListServicesRequest{Namespace: "shop", WithFrontends: true}, "shop/web LoadBalancer 3"},
		{"a name", &lbv1.ListServicesRequest{Name: "none"}, "default/none Headless 0"},
		{"an address", &lbv1.ListServicesRequest{Address: "203.0.113.1"}, "shop/web LoadBalancer 0"},
		{"no such address", &lbv1.ListServicesRequest{Address: "203.0.113.2"}, ""},
		{
			"calls without a manager", &lbv1.ListServicesRequest{Manager: &none},
			"default/none Headless 0, shop/web LoadBalancer 0",
		},
		{"another manager", &lbv1.ListServicesRequest{Manager: &other}, ""},
	} {
		list, err := r.ListServices(r.ctx(), c.req)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for {
			m, err := list.Recv()
			if err != nil {
				break
			}
			if m.GetRevision() != 2 {
				t.Errorf("%s: revision %d", c.what, m.GetRevision())
			}
			if s := m.GetService(); s != nil {
				got = append(got, fmt.Sprintf("%s/%s %s %d", s.GetNamespace(), s.GetName(), s.GetType(), len(s.GetFrontends())))
			} else {
				got = append(got, "!"+m.GetRefused().GetKey().GetNamespace()+"/"+m.GetRefused().GetKey().GetName())
			}
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("%s: %q, want %s", c.what, got, c.want)
		}
	}
}

func TestWatchTellsOfServices(t *testing.T) {
	r := serve(t)
	r.apply(web)
	ctx, cancel := context.WithCancel(r.ctx())
	defer cancel()
	w, err := r.WatchServices(ctx, &lbv1.WatchServicesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	next := func() (*lbv1.WatchServicesResponse, string) {
		t.Helper()
		m, err := w.Recv()
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case m.GetUpsert() != nil:
			return m, fmt.Sprintf("upsert %s ready %d enforced %t", m.GetUpsert().GetName(), m.GetUpsert().GetReady(),
				m.GetUpsert().GetEnforced())
		case m.GetDelete() != nil:
			return m, "delete " + m.GetDelete().GetName()
		}
		return m, fmt.Sprintf("bookmark %t", m.GetBookmark().GetSnapshotComplete())
	}
	want := func(what, text string) *lbv1.WatchServicesResponse {
		t.Helper()
		m, got := next()
		if got != text {
			t.Fatalf("%s: %s, want %s", what, got, text)
		}
		return m
	}
	want("the listing", "upsert web ready 2 enforced false")
	want("its end", "bookmark true")
	s, err := r.owner.Subscribers().Subscribe(r.ctx(), owner.Subscription{Name: "datapath", Enforces: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Next(r.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := s.Ack(r.ctx(), 1, 0); err != nil {
		t.Fatal(err)
	}
	m := want("enforced", "upsert web ready 2 enforced true")
	r.apply(strings.Replace(web, "addresses: [10.0.0.3]", "addresses: [10.0.0.4]", 1))
	want("a change", "upsert web ready 2 enforced false")
	if _, err := r.DeleteServices(r.ctx(), &lbv1.DeleteServicesRequest{Keys: []*lbv1.ObjectKey{{
		Kind:      "Service",
		Namespace: "shop", Name: "web",
	}}}); err != nil {
		t.Fatal(err)
	}
	want("a deletion", "delete web")
	again, err := r.WatchServices(ctx, &lbv1.WatchServicesRequest{ResumeToken: m.GetResumeToken()})
	if err != nil {
		t.Fatal(err)
	}
	w = again
	want("resumed", "delete web")
	w, err = r.WatchServices(ctx, &lbv1.WatchServicesRequest{ResumeToken: []byte("another run")})
	if err == nil {
		_, err = w.Recv()
	}
	if status.Code(err) != codes.OutOfRange {
		t.Errorf("a token of another run: %v", err)
	}
}

func TestFirstMessageIsSubscribeAndNoOther(t *testing.T) {
	r := serve(t)
	for _, messages := range [][]*lbv1.WatchFrontendsRequest{
		{{Message: &lbv1.WatchFrontendsRequest_Ack{Ack: &lbv1.Ack{}}}},
		{
			{Message: &lbv1.WatchFrontendsRequest_Subscribe{Subscribe: &lbv1.Subscribe{
				Name: "a",
				Role: lbv1.SubscriberRole_SUBSCRIBER_ROLE_WATCHES,
			}}},
			{Message: &lbv1.WatchFrontendsRequest_Subscribe{Subscribe: &lbv1.Subscribe{
				Name: "a",
				Role: lbv1.SubscriberRole_SUBSCRIBER_ROLE_WATCHES,
			}}},
		},
	} {
		w, err := r.WatchFrontends(r.ctx())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range messages {
			if err := w.Send(m); err != nil {
				t.Fatal(err)
			}
		}
		for err == nil {
			_, err = w.Recv()
		}
		if !rpcerr.Is(err, lbv1.ErrorReason_ERROR_REASON_INVALID_REQUEST) || status.Code(err) != codes.InvalidArgument {
			t.Errorf("%d messages: %v", len(messages), err)
		}
	}
}

func TestErrorsHaveTheirCodes(t *testing.T) {
	seen := map[lbv1.ErrorReason]bool{}
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason lbv1.ErrorReason
	}{
		{
			&manifest.Error{Violations: []manifest.Violation{{Document: 1, Path: "spec", Text: "x"}}}, codes.InvalidArgument,
			lbv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST,
		},
		{&manifest.Error{Whole: errors.New("x")}, codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST},
		{
			&failure.FieldError{Field: "f", Err: errors.New("x")}, codes.InvalidArgument,
			lbv1.ErrorReason_ERROR_REASON_INVALID_REQUEST,
		},
		{
			&failure.FieldError{Field: "x", Err: failure.ErrNotFound}, codes.NotFound,
			lbv1.ErrorReason_ERROR_REASON_SERVICE_NOT_FOUND,
		},
		{failure.ErrNotFound, codes.NotFound, lbv1.ErrorReason_ERROR_REASON_SERVICE_NOT_FOUND},
		{failure.ErrOwned, codes.AlreadyExists, lbv1.ErrorReason_ERROR_REASON_OBJECT_OWNED},
		{failure.ErrForeign, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_OBJECT_FOREIGN},
		{failure.ErrEmpty, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_SET_EMPTY},
		{failure.ErrRefused, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER},
		{failure.ErrLimit, codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED},
		{stream.ErrOverflow, codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED},
		{failure.ErrChanged, codes.Aborted, lbv1.ErrorReason_ERROR_REASON_STATE_CHANGED},
		{failure.ErrReplaced, codes.Aborted, lbv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED},
		{failure.ErrAck, codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK},
		{failure.ErrRevision, codes.OutOfRange, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION},
		{failure.ErrStorage, codes.Unavailable, lbv1.ErrorReason_ERROR_REASON_STORAGE_FAILED},
		{failure.ErrStopped, codes.Unavailable, lbv1.ErrorReason_ERROR_REASON_STOPPING},
		{errors.New("a bug"), codes.Internal, lbv1.ErrorReason_ERROR_REASON_INTERNAL},
	} {
		seen[c.reason] = true
		if err := statusOf(fmt.Errorf("of a test: %w", c.err)); status.Code(err) != c.code || !rpcerr.Is(err, c.reason) {
			t.Errorf("%v is %v, want %s %s", c.err, err, c.code, c.reason)
		}
	}
	// Reasons that kit/watch returns.
	seen[lbv1.ErrorReason_ERROR_REASON_TOKEN_EXPIRED], seen[lbv1.ErrorReason_ERROR_REASON_UNSPECIFIED] = true, true
	for n, name := range lbv1.ErrorReason_name {
		if !seen[lbv1.ErrorReason(n)] {
			t.Errorf("no error has the reason %s", name)
		}
	}
}

func TestRepliesOfWrongManifestsNameDocumentAndField(t *testing.T) {
	r := serve(t)
	_, err := r.UpsertServices(r.ctx(), &lbv1.UpsertServicesRequest{Manifests: []byte(web +
		"---\napiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{prot: 80}]}\n")})
	fields := rpcerr.Fields(err)
	if status.Code(err) != codes.InvalidArgument || len(fields) != 1 ||
		fields[0].GetField() != "manifests[2].spec.ports[0].prot" {
		t.Errorf("%v: %v", err, fields)
	}
	if st, err := r.GetStatus(r.ctx(), &lbv1.GetStatusRequest{}); err != nil || st.GetServices() != 0 {
		t.Errorf("%v, %v", st, err)
	}
}

func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	doc, err := os.ReadFile("../../../../docs/reference/loadbalancer.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("`(sluice_loadbalancer_[a-z_]+)`").FindAllStringSubmatch(string(doc), -1) {
		documented[m[1]] = true
	}
	r := serve(t)
	r.apply(web)
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(Collector{Owner: r.owner}); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue()
		if !documented[f.GetName()] {
			t.Errorf("docs/reference/loadbalancer.md does not have %s", f.GetName())
		}
	}
	for name := range documented {
		if _, ok := got[name]; !ok {
			t.Errorf("docs/reference/loadbalancer.md has %s, which does not exist", name)
		}
	}
	for name, want := range map[string]float64{
		"services": 1, "endpoint_slices": 1, "frontends": 3, "backends": 2,
		"revision": 1, "problems": 0, "orphaned_slices": 0,
	} {
		if v := got["sluice_loadbalancer_"+name]; v != want {
			t.Errorf("%s is %v, want %v", name, v, want)
		}
	}
}

func TestSharesAreThoseOfTheNamespaces(t *testing.T) {
	r := serve(t)
	r.apply(web)
	used := func(tenant string) map[string]uint64 {
		t.Helper()
		stream, err := r.shares.ListShares(r.ctx(), &sharesv1.ListSharesRequest{Tenant: tenant})
		if err != nil {
			t.Fatal(err)
		}
		out := make(map[string]uint64)
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return out
			}
			if err != nil {
				t.Fatal(err)
			}
			out[m.GetLimit().GetName()] += 0
			for _, s := range m.GetTenants() {
				if s.GetKind() != sharesv1.TenantKind_TENANT_KIND_NAMESPACE || s.GetAdmitted() != s.GetAsked() {
					t.Errorf("%v", s)
				}
				out[m.GetLimit().GetName()] += s.GetAdmitted()
			}
		}
	}
	if got := used("shop"); got["frontends"] == 0 || len(got) < 2 {
		t.Errorf("shop uses %v, want frontends", got)
	}
	if got := used("other"); got["frontends"] != 0 || len(got) < 2 {
		t.Errorf("other uses %v, want 0 for each limit", got)
	}
}
