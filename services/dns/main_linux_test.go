// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/dns/internal/frame"
	"github.com/sluice-net/sluice/services/dns/internal/frame/frametest"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/store"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	leaktest.Main(m)
}

// proc is one process of the service.
type proc struct {
	dnsv1.DNSServiceClient
	*servicetest.Process
}

// stateDir returns the directory that the service creates with its mode.
func stateDir(place *servicetest.Place) string { return filepath.Join(place.Dir, "state", "dns") }

func start(t *testing.T, place *servicetest.Place, args ...string) *proc {
	t.Helper()
	socket := filepath.Join(place.Dir, "run", "dns.sock")
	p := servicetest.Start(t, place.Command(append([]string{
		"--socket-path", socket, "--metrics-address", "off", "--state-dir", stateDir(place),
		"--policy", filepath.Join(place.Dir, "policy.sock"), "--identity", filepath.Join(place.Dir, "identity.sock"),
		"--datapath", filepath.Join(place.Dir, "datapath.sock"), "--proxy-socket", filepath.Join(place.Dir, "proxy.sock"),
	}, args...)...), socket, client.Options{WaitForReady: true})
	return &proc{dnsv1.NewDNSServiceClient(p.Conn), p}
}

// list returns the names and addresses of a listing, as text.
func (p *proc) list(t *testing.T, req *dnsv1.ListNamesRequest) string {
	t.Helper()
	stream, err := p.ListNames(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return strings.Join(out, " ")
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range m.GetName().GetAddresses() {
			if a.GetEnforceTime() != nil {
				t.Errorf("%v is enforced, but sluice-policy does not run", a)
			}
			out = append(out, m.GetName().GetName()+"="+a.GetAddress())
		}
	}
}

// prepare writes names as an earlier process would.
func prepare(t *testing.T, place *servicetest.Place) {
	t.Helper()
	s, _, _, err := store.Open(stateDir(place))
	if err != nil {
		t.Fatal(err)
	}
	web := names.Asker{Endpoint: 7, Tenant: "namespace shop"}
	entry := func(a string) names.Entry {
		return names.Entry{Addr: netip.MustParseAddr(a), Expires: time.Now().Add(time.Hour), Payer: web}
	}
	err = s.Save([]names.Name{
		{Name: "api.example.com.", Payer: web, Chain: []string{"edge.cdn.example."}, Entries: []names.Entry{
			entry("192.0.2.7"), entry("198.51.100.7"), entry("2001:db8::7"),
		}},
		{Name: "www.example.com.", Payer: web, Entries: []names.Entry{entry("192.0.2.7")}},
	}, nil)
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(stateDir(place), "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(files, stateDir(place)) {
		if err := os.Chown(f, int(instance.DNSID), int(instance.GroupID)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNamesAreListedExplainedAndDeletedAcrossRestarts(t *testing.T) {
	place := servicetest.NewPlace(t, instance.DNSID)
	prepare(t, place)
	p := start(t, place, "--never-learn", "198.51.100.0/24")
	const both = "api.example.com.=192.0.2.7 api.example.com.=2001:db8::7 www.example.com.=192.0.2.7"
	if got := p.list(t, &dnsv1.ListNamesRequest{}); got != both {
		t.Errorf("listed %s", got)
	}
	filtered := &dnsv1.ListNamesRequest{Pattern: "w*.example.com", Address: "192.0.2.7"}
	if got := p.list(t, filtered); got != "www.example.com.=192.0.2.7" {
		t.Errorf("filtered: %s", got)
	}
	e, err := p.ExplainName(t.Context(), &dnsv1.ExplainNameRequest{Name: "API.example.com"})
	if err != nil || len(e.GetName().GetAddresses()) != 2 || e.GetName().GetChain()[0] != "edge.cdn.example." ||
		e.GetName().GetAsker().GetEndpointIndex() != 7 || !e.GetWanted() {
		t.Errorf("explained: %v, %v", e, err)
	}
	if e, err := p.ExplainName(t.Context(), &dnsv1.ExplainNameRequest{Name: "unknown.example"}); err != nil ||
		e.GetName().GetName() != "unknown.example." || len(e.GetName().GetAddresses()) != 0 || e.GetName().GetAsker() != nil {
		t.Errorf("unknown: %v, %v", e, err)
	}
	for _, dry := range []bool{true, false} {
		before := p.list(t, &dnsv1.ListNamesRequest{})
		d, err := p.DeleteNames(t.Context(), &dnsv1.DeleteNamesRequest{
			Pattern: "*", Address: "192.0.2.7", ValidateOnly: dry,
		})
		if err != nil || d.GetNameCount() != 2 || d.GetAddressCount() != 2 {
			t.Errorf("deleted: %v, %v", d, err)
		}
		if same := before == p.list(t, &dnsv1.ListNamesRequest{}); same != dry {
			t.Errorf("validate_only %t: the list is the same: %t", dry, same)
		}
	}
	p.Stop()
	p = start(t, place)
	if got := p.list(t, &dnsv1.ListNamesRequest{}); got != "api.example.com.=2001:db8::7" {
		t.Errorf("after a restart: %s", got)
	}
	p.Stop()
}

func TestWrongRequestsAreRefused(t *testing.T) {
	p := start(t, servicetest.NewPlace(t, instance.DNSID))
	calls := map[string]func(context.Context) error{
		"no filter": func(ctx context.Context) error {
			_, err := p.DeleteNames(ctx, &dnsv1.DeleteNamesRequest{})
			return err
		},
		"a pattern with a space": func(ctx context.Context) error {
			_, err := p.DeleteNames(ctx, &dnsv1.DeleteNamesRequest{Pattern: "a b"})
			return err
		},
		"an address that is none": func(ctx context.Context) error {
			_, err := p.DeleteNames(ctx, &dnsv1.DeleteNamesRequest{Address: "x"})
			return err
		},
		"a pattern as a name": func(ctx context.Context) error {
			_, err := p.ExplainName(ctx, &dnsv1.ExplainNameRequest{Name: "*.a"})
			return err
		},
		"no name": func(ctx context.Context) error {
			_, err := p.ExplainName(ctx, &dnsv1.ExplainNameRequest{})
			return err
		},
	}
	for what, call := range calls {
		if err := call(t.Context()); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
	p.Stop()
}

func TestCorruptStateDoesNotStopTheService(t *testing.T) {
	place := servicetest.NewPlace(t, instance.DNSID)
	prepare(t, place)
	files, err := filepath.Glob(filepath.Join(stateDir(place), "names.*.db"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	if err := os.Truncate(files[0], 5000); err != nil {
		t.Fatal(err)
	}
	p := start(t, place)
	if got := p.list(t, &dnsv1.ListNamesRequest{}); got != "" {
		t.Errorf("listed %s", got)
	}
	p.Stop()
	if info, err := os.Stat(filepath.Join(stateDir(place), store.AsideName)); err != nil || info.Size() != 5000 {
		t.Errorf("the corrupt file: %v, %v", info, err)
	}
}

// policy simulates sluice-policy with one rule set.
type policy struct {
	policyv1.UnimplementedPolicyServiceServer
	learned chan *policyv1.LearnNamesRequest
}

func (*policy) WatchRuleSets(
	_ *policyv1.WatchRuleSetsRequest, stream grpc.ServerStreamingServer[policyv1.WatchRuleSetsResponse],
) error {
	for _, m := range []*policyv1.WatchRuleSetsResponse{
		{Event: &policyv1.WatchRuleSetsResponse_Upsert{Upsert: &policyv1.RuleSet{
			Number: 9, Proxy: netv1.Proxy_PROXY_DNS, DnsNames: []string{"*.example.com"},
		}}},
		{
			ResumeToken: []byte("1"),
			Event:       &policyv1.WatchRuleSetsResponse_Bookmark{Bookmark: &policyv1.RuleSetBookmark{SnapshotComplete: true}},
		},
	} {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (p *policy) LearnNames(
	_ context.Context, r *policyv1.LearnNamesRequest,
) (*policyv1.LearnNamesResponse, error) {
	p.learned <- r
	return &policyv1.LearnNamesResponse{}, nil
}

// datapath simulates sluice-datapath with the endpoint 7, and keeps the reported messages.
type datapath struct {
	datapathv1.UnimplementedDatapathServiceServer
	datapathv1.UnimplementedDNSReportServiceServer
	reported chan *datapathv1.ReportedDNSMessage
}

func (*datapath) WatchEndpoints(
	_ *datapathv1.WatchEndpointsRequest, stream grpc.ServerStreamingServer[datapathv1.WatchEndpointsResponse],
) error {
	endpoint := &datapathv1.Endpoint{
		Owner: &workloadv1.Owner{ContainerId: "c", InterfaceName: "eth0"}, EndpointIndex: 7, Identity: 300,
		Labels: []*workloadv1.Label{{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "shop"}},
	}
	for _, m := range []*datapathv1.WatchEndpointsResponse{
		{Event: &datapathv1.WatchEndpointsResponse_Upsert{Upsert: endpoint}},
		{
			ResumeToken: []byte("1"),
			Event:       &datapathv1.WatchEndpointsResponse_Bookmark{Bookmark: &datapathv1.Bookmark{SnapshotComplete: true}},
		},
	} {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (d *datapath) ReportDNSMessages(
	_ context.Context, r *datapathv1.ReportDNSMessagesRequest,
) (*datapathv1.ReportDNSMessagesResponse, error) {
	for _, m := range r.GetMessages() {
		d.reported <- m
	}
	return &datapathv1.ReportDNSMessagesResponse{}, nil
}

// serve registers services at a socket of the test environment.
func serve(t *testing.T, place *servicetest.Place, name string, register func(*grpc.Server)) {
	t.Helper()
	path := filepath.Join(place.Dir, name)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	open(t, path)
	served, ended := grpc.NewServer(), make(chan error, 1)
	register(served)
	go func() { ended <- served.Serve(l) }()
	t.Cleanup(func() {
		served.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// open lets the service connect to a socket of the test.
func open(t *testing.T, path string) {
	t.Helper()
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
}

// attachment gives a process a queue and the memory of a heartbeat. It returns the other end of the queue, and the
// memory.
func attachment(t *testing.T, path string) (queue, beat int) {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	open(t, path)
	conn, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if beat, err = unix.MemfdCreate("beat", unix.MFD_CLOEXEC); err == nil {
		err = unix.Ftruncate(beat, int64(os.Getpagesize()))
	}
	if err != nil {
		t.Fatal(err)
	}
	m, err := proto.Marshal(&datapathv1.ProxyAttachment{Proxy: netv1.Proxy_PROXY_DNS, TapDevice: "sldns0", TapMtu: 1500})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := conn.WriteMsgUnix(m, unix.UnixRights(fds[0], beat), nil); err != nil {
		t.Fatal(err)
	}
	unix.Close(fds[0])
	t.Cleanup(func() {
		conn.Close()
		unix.Close(fds[1])
		unix.Close(beat)
	})
	return fds[1], beat
}

// message returns a query for an address of a name, or, if an address is given, the answer with this address.
func message(t *testing.T, name string, address ...[4]byte) []byte {
	t.Helper()
	q := dnsmessage.Question{Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}
	m := dnsmessage.Message{
		Header: dnsmessage.Header{ID: 5, Response: len(address) > 0}, Questions: []dnsmessage.Question{q},
	}
	for _, a := range address {
		m.Answers = append(m.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 60},
			Body:   &dnsmessage.AResource{A: a},
		})
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestProcessServesTheQueueOfTheDatapath runs the process with its own user and in its sandbox. The process takes
// over the descriptors, releases and refuses queries, and releases an answer once sluice-policy has learned its
// address.
func TestProcessServesTheQueueOfTheDatapath(t *testing.T) {
	place := servicetest.NewPlace(t, instance.DNSID)
	enforcer := &policy{learned: make(chan *policyv1.LearnNamesRequest, 1)}
	serve(t, place, "policy.sock", func(s *grpc.Server) { policyv1.RegisterPolicyServiceServer(s, enforcer) })
	node := &datapath{reported: make(chan *datapathv1.ReportedDNSMessage, 16)}
	serve(t, place, "datapath.sock", func(s *grpc.Server) {
		datapathv1.RegisterDatapathServiceServer(s, node)
		datapathv1.RegisterDNSReportServiceServer(s, node)
	})
	p := start(t, place)
	queue, beat := attachment(t, filepath.Join(place.Dir, "proxy.sock"))
	packet := frametest.Packet{
		Tag:    frame.Tag{Set: 9, Endpoint: 7, Role: frame.Initiator},
		Source: netip.MustParseAddrPort("10.244.0.7:40000"), Destination: netip.MustParseAddrPort("10.96.0.10:53"),
	}
	exchange := func(b []byte) []byte {
		t.Helper()
		if _, err := unix.Write(queue, b); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, frame.MaxSize)
		n, err := unix.Read(queue, got)
		if err != nil || n == 0 {
			t.Fatalf("%d, %v", n, err)
		}
		return got[:n]
	}
	packet.Payload = message(t, "www.example.com.")
	if got := exchange(packet.Bytes()); !bytes.Equal(got, packet.Bytes()) {
		t.Errorf("query: % x", got)
	}
	answer := packet
	answer.Role, answer.Source, answer.Destination = frame.Responder, packet.Destination, packet.Source
	answer.Payload = message(t, "www.example.com.", [4]byte{192, 0, 2, 7})
	if got := exchange(answer.Bytes()); !bytes.Equal(got, answer.Bytes()) {
		t.Errorf("answer: % x", got)
	}
	if r := <-enforcer.learned; r.GetName() != "www.example.com." || strings.Join(r.GetAddresses(), " ") != "192.0.2.7" ||
		r.GetAsker().GetNamespace() != "shop" || r.GetAsker().GetIdentity() != 300 {
		t.Errorf("learned %v", r)
	}
	packet.Payload = message(t, "x.refused.")
	var f frame.Frame
	var m dnsmessage.Message
	if err := f.Read(exchange(packet.Bytes())); err != nil || f.Source != packet.Destination {
		t.Errorf("refused: %v, %+v", err, f)
	} else if err := m.Unpack(f.Payload); err != nil || m.RCode != dnsmessage.RCodeRefused {
		t.Errorf("refused: %v, %+v", err, m.Header)
	}
	want := map[string]bool{"www.example.com. false": true, "www.example.com. true": true, "x.refused. false": true}
	for len(want) > 0 {
		r := <-node.reported
		delete(want, fmt.Sprint(r.GetMessage().GetName(), " ", r.GetMessage().GetResponse()))
	}
	b := make([]byte, 8)
	if _, err := unix.Pread(beat, b, 0); err != nil || binary.NativeEndian.Uint64(b) == 0 {
		t.Errorf("the heartbeat: % x, %v", b, err)
	}
	p.Stop()
}
