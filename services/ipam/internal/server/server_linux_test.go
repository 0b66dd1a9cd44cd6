// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/reasontest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/ipam/internal/cluster"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

func TestMain(m *testing.M) {
	run := func() int { return leaktest.Run(m) }
	os.Exit(reasontest.Run(run, ipamv1.ErrorReason_ERROR_REASON_UNSPECIFIED, map[string]string{
		"BUSY": "it takes 1,024 calls that wait; package ipam has them",
		// The table is shown them by TestEverySentinelHasItsCodeAndReason.
		"CLUSTER_POOL_EXHAUSTED": "it takes an agent of the cluster's pool",
		"CLUSTER_UNAVAILABLE":    "it takes an agent of the cluster's pool",
	}))
}

type service struct {
	ipamv1.IPAMServiceClient
	store     *ipamtest.Memory
	allocator *ipam.Allocator
	metrics   *Metrics
	registry  *prometheus.Registry
	socket    string
	stop      func() // ends the allocator, not the server
	lost      bool   // the store is; the allocator ends by itself
}

// serve answers on a real socket. The caller of the test counts as root.
func serve(t *testing.T, o ipam.Options) *service {
	t.Helper()
	s := &service{store: ipamtest.NewMemory(), metrics: NewMetrics(), registry: prometheus.NewRegistry()}
	o.Field, o.Lease, o.Observe = "pools", ipam.DefaultLease, s.metrics.Observer()
	a, err := ipam.New(s.store, o)
	if err != nil {
		t.Fatal(err)
	}
	s.allocator = a
	if err := s.metrics.Register(s.registry, a, func() bool { return false }); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "ipam")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })      //nolint:errcheck // a leak shows elsewhere
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // another user connects
		t.Fatal(err)
	}
	s.socket = filepath.Join(dir, "s", "ipam.sock")
	l, err := rpc.Listen(s.socket, rpc.ListenOptions{Mode: 0o666, DirMode: 0o755})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := rpc.NewServer(rpc.Options{
		Register: New(a, s.metrics, "v1", time.Unix(1_800_000_000, 0)).Register,
		Methods:  Methods(), AlsoRoot: []uint32{uint32(os.Getuid())},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran, served := make(chan error, 1), make(chan error, 1)
	go func() { ran <- a.Run(ctx) }()
	go func() { served <- srv.Serve(l) }()
	stopped := false
	s.stop = func() {
		if !stopped {
			stopped = true
			cancel()
			if err := <-ran; err != nil && !(s.lost && errors.Is(err, ipam.ErrStoreLost)) {
				t.Errorf("Run: %v", err)
			}
		}
	}
	s.IPAMServiceClient = ipamv1.NewIPAMServiceClient(reasontest.Record(dial(t, s.socket, nil)))
	t.Cleanup(func() {
		srv.Stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		s.stop()
	})
	return s
}

func dial(t *testing.T, socket string, dialer func(context.Context, string) (net.Conn, error)) *grpc.ClientConn {
	t.Helper()
	o := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if dialer != nil {
		o = append(o, grpc.WithContextDialer(dialer))
	}
	conn, err := grpc.NewClient("unix:"+socket, o...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() }) //nolint:errcheck // the test is over
	return conn
}

func owner(id string) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
}

func detail[T proto.Message](err error) (found T, ok bool) {
	for _, d := range status.Convert(err).Details() {
		if m, is := d.(T); is {
			return m, true
		}
	}
	return found, false
}

func small() ipam.Options {
	return ipam.Options{Ranges: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/29"), netip.MustParsePrefix("fd00::/64")}, Quarantine: time.Hour}
}

// TestNamespaceOfACallCounts: the namespace of the request decides which addresses are reserved for others.
func TestNamespaceOfACallCounts(t *testing.T) {
	o := small()
	o.Ranges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/26")}
	s := serve(t, o)
	allocate := func(i int, namespace string) error {
		id := fmt.Sprintf("c%d", i)
		got, err := s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner(id), Namespace: namespace})
		if err != nil {
			return err
		}
		_, err = s.ConfirmAllocation(t.Context(), &ipamv1.ConfirmAllocationRequest{
			Owner: owner(id), Addresses: []string{got.GetAllocation().GetAddresses()[0].GetAddress()},
		})
		if err == nil {
			_, err = s.Release(t.Context(), &ipamv1.ReleaseRequest{Owner: owner(id)})
		}
		return err
	}
	var err error
	for i := range 64 {
		if err = allocate(i, "shop"); err != nil {
			break
		}
	}
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "reserved for other namespaces") {
		t.Errorf("the namespace with the addresses in quarantine: %v", err)
	}
	if err := allocate(64, "other"); err != nil {
		t.Errorf("another namespace: %v", err)
	}
}

func TestALifeOverTheSocket(t *testing.T) {
	s := serve(t, small())
	got, err := s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("a")})
	if err != nil {
		t.Fatal(err)
	}
	a := got.GetAllocation()
	if a.GetState() != ipamv1.AllocationState_ALLOCATION_STATE_LEASED || a.GetLeaseExpireTime() == nil || len(a.GetAddresses()) != 2 {
		t.Fatalf("Allocate answered %v", a)
	}
	v4, v6 := a.GetAddresses()[0], a.GetAddresses()[1]
	if v4.GetAddress() != "10.0.0.2" || v4.GetPoolPrefixLength() != 29 || !strings.Contains(v6.GetAddress(), ":") || v6.GetPoolPrefixLength() != 64 {
		t.Fatalf("addresses %v", a.GetAddresses())
	}
	confirmed, err := s.ConfirmAllocation(t.Context(), &ipamv1.ConfirmAllocationRequest{Owner: owner("a"), Addresses: []string{v6.GetAddress(), v4.GetAddress()}})
	if err != nil || confirmed.GetAllocation().GetState() != ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED || confirmed.GetAllocation().GetLeaseExpireTime() != nil {
		t.Fatalf("ConfirmAllocation answered %v, %v", confirmed, err)
	}
	if _, err := s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("B")}); err != nil {
		t.Fatal(err)
	}
	stream, err := s.ListAllocations(t.Context(), &ipamv1.ListAllocationsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for {
		one, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, one.GetAllocation().GetOwner().GetContainerId())
	}
	if !slices.Equal(names, []string{"B", "a"}) {
		t.Errorf("ListAllocations gave %v, want B and a", names)
	}
	for range 2 {
		if _, err := s.Release(t.Context(), &ipamv1.ReleaseRequest{Owner: owner("a")}); err != nil {
			t.Fatal(err)
		}
	}
	st, err := s.GetStatus(t.Context(), &ipamv1.GetStatusRequest{})
	if err != nil || st.GetService().GetVersion() != "v1" || st.GetStateBytes() == 0 || st.GetService().GetStartTime().AsTime().Unix() != 1_800_000_000 {
		t.Fatalf("GetStatus: %v %v", st, err)
	}
	want := &ipamv1.Pool{
		Prefix: "10.0.0.0/29", Gateway: "10.0.0.1", AddressCount: 8, ReservedCount: 3, LeasedCount: 1,
		QuarantinedCount: 1, FreeCount: 3, State: ipamv1.RangeState_RANGE_STATE_SERVING, Primary: true,
	}
	pools, err := s.ListPools(t.Context(), &ipamv1.ListPoolsRequest{})
	if err != nil || len(pools.GetPools()) != 2 || !proto.Equal(pools.GetPools()[0], want) || !proto.Equal(st.GetPools()[0], want) {
		t.Errorf("ListPools: %v %v, want first %v", pools, err, want)
	}
	if p := pools.GetPools()[1]; p.GetAddressCount() != ^uint64(0) || p.GetFreeCount() != ^uint64(0)-3 {
		t.Errorf("the /64 has size %d and %d free", p.GetAddressCount(), p.GetFreeCount())
	}
}

// TestAddressesStayWithTheirManager: a confirmation keeps the manager, and another manager cannot allocate for the same
// owner.
func TestAddressesStayWithTheirManager(t *testing.T) {
	s := serve(t, small())
	ask := func(manager string) (*ipamv1.AllocateResponse, error) {
		return s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("a"), Manager: manager})
	}
	leased, err := ask("nomad")
	if err != nil {
		t.Fatal(err)
	}
	var addresses []string
	for _, a := range leased.GetAllocation().GetAddresses() {
		addresses = append(addresses, a.GetAddress())
	}
	confirmed, err := s.ConfirmAllocation(t.Context(),
		&ipamv1.ConfirmAllocationRequest{Owner: owner("a"), Addresses: addresses})
	if err != nil || confirmed.GetAllocation().GetManager() != "nomad" {
		t.Errorf("confirmed: %v, %v", confirmed, err)
	}
	if again, err := ask("nomad"); err != nil || again.GetAllocation().GetManager() != "nomad" {
		t.Errorf("asked again: %v, %v", again, err)
	}
	for _, other := range []string{"", "cni"} {
		if _, err := ask(other); status.Code(err) != codes.AlreadyExists {
			t.Errorf("asked as %q: %v", other, err)
		}
	}
	if _, err := ask("Nomad!"); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no manager's name: %v", err)
	}
}

// TestRangesAreListedAndThenWatched proves INV-41 for the ranges.
func TestRangesAreListedAndThenWatched(t *testing.T) {
	s := serve(t, ipam.Options{Stored: true})
	stream, err := s.WatchPools(t.Context(), &ipamv1.WatchPoolsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := func(text string) *ipamv1.WatchPoolsResponse {
		t.Helper()
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Join(strings.Fields(fmt.Sprintf("%v %v %v", m.GetUpsert(), m.GetDelete(), m.GetBookmark())), " ")
		if got != text {
			t.Fatalf("the watch says %q, want %q", got, text)
		}
		return m
	}
	_, err = s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("a")})
	retry, _ := detail[*errdetails.RetryInfo](err)
	if status.Code(err) != codes.Unavailable || retry.GetRetryDelay().AsDuration() <= 0 {
		t.Fatalf("Allocate without a range: %v", err)
	}
	ranges := func(list ...string) {
		t.Helper()
		var all []netip.Prefix
		for _, p := range list {
			all = append(all, netip.MustParsePrefix(p))
		}
		if err := s.allocator.SetRanges(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	ranges("10.0.0.0/29")
	want(`prefix:"10.0.0.0/29" state:RANGE_STATE_SERVING node_addresses:"10.0.0.1" primary:true <nil>`)
	token := want(`<nil> snapshot_complete:true`).GetResumeToken()
	if _, err := s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("a")}); err != nil {
		t.Fatal(err)
	}
	if stream, err = s.WatchPools(t.Context(), &ipamv1.WatchPoolsRequest{ResumeToken: token}); err != nil {
		t.Fatal(err)
	}
	want(`<nil>`) // a bookmark at once: nothing was missed
	ranges("fd00::/64")
	want(`prefix:"fd00::/64" state:RANGE_STATE_SERVING node_addresses:"fd00::1" primary:true <nil>`)
	want(`prefix:"10.0.0.0/29" state:RANGE_STATE_DRAINING node_addresses:"10.0.0.1" primary:true <nil>`)
	if _, err := s.Release(t.Context(), &ipamv1.ReleaseRequest{Owner: owner("a")}); err != nil {
		t.Fatal(err)
	}
	want(`<nil> 10.0.0.0/29 <nil>`)
}

func TestEveryCodeReachesTheCallerWithItsDetails(t *testing.T) {
	s := serve(t, small())
	allocate := func(r *ipamv1.AllocateRequest) error {
		_, err := s.Allocate(t.Context(), r)
		return err
	}
	confirm := func(id string, list ...string) error {
		_, err := s.ConfirmAllocation(t.Context(), &ipamv1.ConfirmAllocationRequest{Owner: owner(id), Addresses: list})
		return err
	}
	v4 := []ipamv1.Family{ipamv1.Family_FAMILY_IPV4}
	if err := allocate(&ipamv1.AllocateRequest{Owner: owner("a"), RequestedAddresses: []string{"10.0.0.4"}}); err != nil {
		t.Fatal(err)
	}
	field := func(name string) func(error) bool {
		return func(err error) bool {
			b, ok := detail[*errdetails.BadRequest](err)
			return ok && b.GetFieldViolations()[0].GetField() == name
		}
	}
	has := func(find func(error) bool) func(error) bool { return find }
	resource := has(func(err error) bool { _, ok := detail[*errdetails.ResourceInfo](err); return ok })
	because := func(r ipamv1.ErrorReason) func(error) bool { return func(err error) bool { return rpcerr.Is(err, r) } }
	for _, c := range []struct {
		name  string
		err   error
		want  codes.Code
		check func(error) bool
	}{
		{"no owner", allocate(&ipamv1.AllocateRequest{}), codes.InvalidArgument, field("owner")},
		{"an unknown family", allocate(&ipamv1.AllocateRequest{Owner: owner("b"), Families: []ipamv1.Family{0}}), codes.InvalidArgument, field("families[0]")},
		{"an address with a zone", allocate(&ipamv1.AllocateRequest{Owner: owner("b"), RequestedAddresses: []string{"fe80::1%eth0"}}), codes.InvalidArgument, field("requested_addresses[0]")},
		{"an address in no pool", allocate(&ipamv1.AllocateRequest{Owner: owner("b"), RequestedAddresses: []string{"192.0.2.1"}}), codes.InvalidArgument, field("requested_addresses[0]")},
		{"confirming IPv4 in IPv6 form", confirm("a", "::ffff:10.0.0.4"), codes.InvalidArgument, field("addresses[0]")},
		{"confirming nothing", confirm("a"), codes.InvalidArgument, field("addresses")},
		{"other content", allocate(&ipamv1.AllocateRequest{Owner: owner("a"), Families: v4}), codes.AlreadyExists, resource},
		{"a taken address", allocate(&ipamv1.AllocateRequest{Owner: owner("b"), RequestedAddresses: []string{"10.0.0.4"}}), codes.FailedPrecondition, because(ipamv1.ErrorReason_ERROR_REASON_ADDRESS_UNAVAILABLE)},
		{"confirming other addresses", confirm("a", "10.0.0.5"), codes.FailedPrecondition, because(ipamv1.ErrorReason_ERROR_REASON_ADDRESSES_DIFFER)},
		{"confirming for nobody", confirm("nobody", "10.0.0.5"), codes.NotFound, resource},
	} {
		if status.Code(c.err) != c.want || !c.check(c.err) {
			t.Errorf("%s: %v with details %v, want %s", c.name, c.err, status.Convert(c.err).Details(), c.want)
		}
	}

	for i := range 4 {
		if err := allocate(&ipamv1.AllocateRequest{Owner: owner(fmt.Sprint(i)), Families: v4}); err != nil {
			t.Fatal(err)
		}
	}
	err := allocate(&ipamv1.AllocateRequest{Owner: owner("b")})
	quota, ok := detail[*errdetails.QuotaFailure](err)
	if status.Code(err) != codes.ResourceExhausted || !ok || quota.GetViolations()[0].GetSubject() != "pool:10.0.0.0/29" ||
		!strings.Contains(quota.GetViolations()[0].GetDescription(), "5 leased") {
		t.Errorf("a full pool: %v with %v", err, quota)
	}

	ctx, cancel := context.WithTimeout(t.Context(), -time.Second)
	defer cancel()
	if _, err := s.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner("a")}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a call that is too late: %v", err)
	}

	s.store.Fail(func(*ipam.Changes) (bool, error) { return false, ipamtest.ErrDisk })
	err = confirm("0", "10.0.0.2")
	if _, ok := detail[*errdetails.RetryInfo](err); !ok || status.Code(err) != codes.Unavailable {
		t.Errorf("a full disk: %v", err)
	}
	s.store.Fail(nil)
	s.stop()
	if _, err := s.Release(t.Context(), &ipamv1.ReleaseRequest{Owner: owner("a")}); status.Code(err) != codes.Unavailable {
		t.Errorf("after the end of the loop: %v", err)
	}
}

// TestStoreThatIsLostIsNamed: the error of the allocator also says that the state could not be written.
func TestStoreThatIsLostIsNamed(t *testing.T) {
	s := serve(t, small())
	s.lost = true
	if _, err := s.Allocate(t.Context(), &ipamv1.AllocateRequest{
		Owner: owner("a"), RequestedAddresses: []string{"10.0.0.4"},
		Families: []ipamv1.Family{ipamv1.Family_FAMILY_IPV4},
	}); err != nil {
		t.Fatal(err)
	}
	s.store.Fail(func(*ipam.Changes) (bool, error) { return false, ipam.ErrStoreLost })
	_, err := s.ConfirmAllocation(t.Context(), &ipamv1.ConfirmAllocationRequest{
		Owner: owner("a"), Addresses: []string{"10.0.0.4"},
	})
	if status.Code(err) != codes.Unavailable || !rpcerr.Is(err, ipamv1.ErrorReason_ERROR_REASON_STORAGE_UNCERTAIN) {
		t.Errorf("%v, want UNAVAILABLE STORAGE_UNCERTAIN", err)
	}
}

// TestEverySentinelHasItsCodeAndReason reads the names of the sentinels from the
// core's source, so that a new one cannot be forgotten here.
func TestEverySentinelHasItsCodeAndReason(t *testing.T) {
	type row struct {
		err    error
		code   codes.Code
		reason ipamv1.ErrorReason // unspecified: the answer has none
	}
	table := map[string]row{
		"ErrExhausted":    {&ipam.ExhaustedError{Family: ipam.IPv4}, codes.ResourceExhausted, ipamv1.ErrorReason_ERROR_REASON_POOL_EXHAUSTED},
		"ErrOtherContent": {ipam.ErrOtherContent, codes.AlreadyExists, ipamv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ADDRESSES},
		"ErrUnavailable":  {ipam.ErrUnavailable, codes.FailedPrecondition, ipamv1.ErrorReason_ERROR_REASON_ADDRESS_UNAVAILABLE},
		"ErrNoPool":       {&ipam.FieldError{Field: "f", Kind: ipam.ErrNoPool}, codes.InvalidArgument, ipamv1.ErrorReason_ERROR_REASON_NO_POOL},
		"ErrBadRequest":   {&ipam.FieldError{Field: "f", Kind: ipam.ErrBadRequest}, codes.InvalidArgument, ipamv1.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		"ErrNoRange":      {ipam.ErrNoRange, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_NO_RANGE},
		"ErrNotHeld":      {ipam.ErrNotHeld, codes.NotFound, ipamv1.ErrorReason_ERROR_REASON_ALLOCATION_NOT_FOUND},
		"ErrMismatch":     {ipam.ErrMismatch, codes.FailedPrecondition, ipamv1.ErrorReason_ERROR_REASON_ADDRESSES_DIFFER},
		"ErrBusy":         {ipam.ErrBusy, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_BUSY},
		"ErrStopped":      {ipam.ErrStopped, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STOPPING},
		"ErrStore":        {ipam.ErrStore, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STORAGE_FAILED},
		"ErrStoreLost":    {fmt.Errorf("%w: %w", ipam.ErrStore, ipam.ErrStoreLost), codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STORAGE_UNCERTAIN},
		// Only at the start, so a caller who sees it found a bug.
		"ErrInconsistent": {ipam.ErrInconsistent, codes.Internal, ipamv1.ErrorReason_ERROR_REASON_INTERNAL},
	}
	source, err := os.ReadFile("../ipam/ipam.go")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`(?m)^\s(Err\w+)\s+= errors\.New`).FindAllStringSubmatch(string(source), -1)
	if len(names) != len(table) {
		t.Errorf("the core has %d sentinels, the table %d", len(names), len(table))
	}
	for _, n := range names {
		if _, ok := table[n[1]]; !ok {
			t.Errorf("%s is not in the table", n[1])
		}
	}
	table["full"] = row{
		&growError{cause: &ipam.ExhaustedError{}, grow: cluster.ErrPoolFull},
		codes.ResourceExhausted, ipamv1.ErrorReason_ERROR_REASON_CLUSTER_POOL_EXHAUSTED,
	}
	table["away"] = row{
		&growError{cause: ipam.ErrNoRange, grow: cluster.ErrAway},
		codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_CLUSTER_UNAVAILABLE,
	}
	table["most"] = row{
		&growError{cause: &ipam.ExhaustedError{}, grow: cluster.ErrMaxBlocks},
		codes.ResourceExhausted, ipamv1.ErrorReason_ERROR_REASON_POOL_EXHAUSTED,
	}
	table["canceled"] = row{context.Canceled, codes.Canceled, 0}
	table["late"] = row{context.DeadlineExceeded, codes.DeadlineExceeded, 0}
	table["unforeseen"] = row{errors.New("surprise"), codes.Internal, ipamv1.ErrorReason_ERROR_REASON_INTERNAL}
	given := map[ipamv1.ErrorReason]bool{0: true}
	for name, r := range table {
		given[r.reason] = true
		got := statusOf(fmt.Errorf("somewhere: %w", r.err))
		if reason, has := rpcerr.ReasonIn(got); status.Code(got) != r.code || has != (r.reason != 0) || has && reason != rpcerr.Of(r.reason) {
			t.Errorf("%s is answered with %s, %v; want %s, %v", name, status.Code(got), reason, r.code, r.reason)
		}
	}
	for number, name := range ipamv1.ErrorReason_name {
		if !given[ipamv1.ErrorReason(number)] {
			t.Errorf("%s is promised and never given", name)
		}
	}
	if statusOf(nil) != nil {
		t.Error("success has a status")
	}
}

// TestKernelRootAndTheDatapathChangeAndTheGroupReads connects as other users,
// which the kernel reports to the server.
func TestKernelRootAndTheDatapathChangeAndTheGroupReads(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test needs root, to become somebody else")
	}
	s := serve(t, small())
	type client struct {
		ipamv1.IPAMServiceClient
		statusv1.ProcessServiceClient
	}
	connectAs := func(uid uintptr) client {
		conn := dial(t, s.socket, servicetest.DialerAs(s.socket, uid))
		return client{ipamv1.NewIPAMServiceClient(conn), statusv1.NewProcessServiceClient(conn)}
	}
	calls := map[string]func(client) error{
		"GetConfig": func(c client) error {
			_, err := c.GetConfig(t.Context(), &statusv1.GetConfigRequest{})
			return err
		},
		"SetLogLevel": func(c client) error {
			_, err := c.SetLogLevel(t.Context(), &statusv1.SetLogLevelRequest{})
			return err
		},
		"Allocate": func(c client) error {
			_, err := c.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("a")})
			return err
		},
		"ConfirmAllocation": func(c client) error {
			_, err := c.ConfirmAllocation(t.Context(), &ipamv1.ConfirmAllocationRequest{Owner: owner("a"), Addresses: []string{"10.0.0.2"}})
			return err
		},
		"Release": func(c client) error {
			_, err := c.Release(t.Context(), &ipamv1.ReleaseRequest{Owner: owner("a")})
			return err
		},
		"ListAllocations": func(c client) error {
			stream, err := c.ListAllocations(t.Context(), &ipamv1.ListAllocationsRequest{})
			if err == nil {
				if _, err = stream.Recv(); errors.Is(err, io.EOF) {
					err = nil
				}
			}
			return err
		},
		"ListPools": func(c client) error {
			_, err := c.ListPools(t.Context(), &ipamv1.ListPoolsRequest{})
			return err
		},
		"WatchPools": func(c client) error {
			stream, err := c.WatchPools(t.Context(), &ipamv1.WatchPoolsRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"GetStatus": func(c client) error {
			_, err := c.GetStatus(t.Context(), &ipamv1.GetStatusRequest{})
			return err
		},
	}
	if len(calls) != len(Methods()) {
		t.Errorf("%d methods are tested of %d", len(calls), len(Methods()))
	}
	as := func(uid uintptr, refused ...string) {
		other := connectAs(uid)
		for name, call := range calls {
			err := call(other)
			if got, want := status.Code(err) == codes.PermissionDenied, slices.Contains(refused, name); got != want {
				t.Errorf("%s as uid %d: %v, want it refused: %v", name, uid, err, want)
			}
		}
	}
	as(64999, "Allocate", "ConfirmAllocation", "Release", "SetLogLevel")
	if st, err := s.GetStatus(t.Context(), &ipamv1.GetStatusRequest{}); err != nil || st.GetPools()[0].GetLeasedCount() != 0 {
		t.Errorf("a refused call changed something: %v %v", st, err)
	}
	as(65706, "SetLogLevel") // the datapath
}

func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	s := serve(t, small())
	if _, err := s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("a")}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner("b"), ValidateOnly: true}); err != nil {
		t.Fatal(err)
	}
	if got := testutil.ToFloat64(s.metrics.allocations.WithLabelValues(resultOK)); got != 1 {
		t.Errorf("%v allocations were counted, want 1: a validation does not count", got)
	}
	families, err := s.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../../../docs/reference/ipam.md")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
		if !strings.Contains(string(doc), "`"+f.GetName()+"`") {
			t.Errorf("docs/reference/ipam.md does not have %s", f.GetName())
		}
	}
	for _, m := range regexp.MustCompile("`(sluice_ipam_[a-z_]+)`").FindAllStringSubmatch(string(doc), -1) {
		if !slices.Contains(names, m[1]) {
			t.Errorf("docs/reference/ipam.md has %s, which does not exist", m[1])
		}
	}
}
