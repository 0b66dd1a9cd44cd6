// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
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

// stateDir returns the directory that the service makes with its mode.
func stateDir(place *servicetest.Place) string { return filepath.Join(place.Dir, "state", "dns") }

func start(t *testing.T, place *servicetest.Place, args ...string) *proc {
	t.Helper()
	socket := filepath.Join(place.Dir, "run", "dns.sock")
	p := servicetest.Start(t, place.Command(append([]string{
		"--socket-path", socket, "--metrics-address", "off", "--state-dir", stateDir(place),
		"--policy", filepath.Join(place.Dir, "policy.sock"), "--identity", filepath.Join(place.Dir, "identity.sock"),
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
