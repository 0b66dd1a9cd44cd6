// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontendwire

import (
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

func backend(at string, terminating bool) frontend.Backend {
	return frontend.Backend{AddrPort: netip.MustParseAddrPort(at), Terminating: terminating}
}

func serviceKey() frontend.Key {
	return frontend.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: 53, Protocol: frontend.UDP}
}

// everyStep has each step, and each field of a frontend with another value than 0.
func everyStep() []frontend.Step {
	node4 := frontend.Key{Addr: netip.IPv4Unspecified(), Port: 30080, Protocol: frontend.TCP, Node: true}
	node6 := frontend.Key{Addr: netip.IPv6Unspecified(), Port: 30080, Protocol: frontend.SCTP, Node: true}
	return []frontend.Step{
		{Upsert: &frontend.Frontend{
			Key: serviceKey(), Kind: frontend.LoadBalancer, Service: "shop/web:dns",
			Inside: &frontend.List{Table: true, Backends: []frontend.Backend{
				backend("10.244.0.1:5353", false), backend("10.244.0.2:5353", true),
			}},
			Outside: &frontend.List{Drop: true, Draining: []frontend.Backend{
				backend("10.244.0.3:5353", true), backend("10.244.0.4:5353", false),
			}},
			Affinity:     3 * time.Hour,
			SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")},
		}},
		{Upsert: &frontend.Frontend{
			Key:  frontend.Key{Addr: netip.MustParseAddr("fd00::1"), Port: 80, Protocol: frontend.TCP},
			Kind: frontend.ClusterIP, Service: "shop/web", Inside: &frontend.List{}, ExceedsShare: true,
			Tenant: shares.Labelled("acme"),
		}},
		{Upsert: &frontend.Frontend{Key: node4, Kind: frontend.NodePort, Service: "shop/web", Inside: &frontend.List{}}},
		{Upsert: &frontend.Frontend{
			Key:  frontend.Key{Addr: netip.MustParseAddr("192.0.2.1"), Port: 80, Protocol: frontend.TCP},
			Kind: frontend.ExternalIP, Service: "shop/web", Outside: &frontend.List{},
		}},
		{Remove: &node6},
		{Barrier: &frontend.Barrier{
			Incarnation: "run-0123456789ab", Seq: 8, Revision: 48, SnapshotComplete: true, State: "state-0123456789",
			SourcesComplete: true,
		}},
	}
}

func TestStepsAreReadAsTheyWereWritten(t *testing.T) {
	want := everyStep()
	in := &loadbalancerv1.WatchFrontendsResponse{}
	for _, st := range want {
		in.Steps = append(in.Steps, Step(st))
	}
	data, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	out := &loadbalancerv1.WatchFrontendsResponse{}
	if err := proto.Unmarshal(data, out); err != nil {
		t.Fatal(err)
	}
	got, err := StepsOf(out.GetSteps())
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read\n%+v, want\n%+v", got, want)
	}
}

// TestFrontendIsWrittenWhole compares a message with the message that other releases send: a difference changes the
// protocol.
func TestFrontendIsWrittenWhole(t *testing.T) {
	want := &loadbalancerv1.Frontend{
		Key:  &loadbalancerv1.FrontendKey{Address: "10.96.0.1", Port: 53, Protocol: netv1.Protocol_PROTOCOL_UDP},
		Kind: loadbalancerv1.FrontendKind_FRONTEND_KIND_LOAD_BALANCER, Namespace: "shop", Name: "web", PortName: "dns",
		Inside: &loadbalancerv1.BackendList{
			WhenEmpty: loadbalancerv1.EmptyAction_EMPTY_ACTION_REJECT,
			Backends: []*loadbalancerv1.Backend{
				{Address: "10.244.0.1", Port: 5353}, {Address: "10.244.0.2", Port: 5353, Terminating: true},
			},
			Algorithm: loadbalancerv1.Algorithm_ALGORITHM_TABLE,
		},
		Outside: &loadbalancerv1.BackendList{
			WhenEmpty: loadbalancerv1.EmptyAction_EMPTY_ACTION_DROP,
			Draining: []*loadbalancerv1.Backend{
				{Address: "10.244.0.3", Port: 5353, Terminating: true}, {Address: "10.244.0.4", Port: 5353},
			},
		},
		AffinitySeconds: 10800, SourceRanges: []string{"192.0.2.0/24", "2001:db8::/32"},
	}
	if got := Frontend(everyStep()[0].Upsert); !proto.Equal(got, want) {
		t.Errorf("written %v, want %v", got, want)
	}
}

func TestCapacityAndRefusalAreReadAsTheyWereWritten(t *testing.T) {
	want := frontend.Capacity{Frontends: 1, Backends: 2, Members: 3, BackendsPerList: 4}
	if got := CapacityOf(Capacity(want)); got != want {
		t.Errorf("the capacity %+v, want %+v", got, want)
	}
	if got := Capacity(frontend.Capacity{}); got != nil {
		t.Errorf("an unknown capacity is %v, want nil", got)
	}
	for _, want := range []frontend.Key{
		serviceKey(),
		{Addr: netip.IPv4Unspecified(), Port: 30080, Protocol: frontend.TCP, Node: true},
		{Addr: netip.IPv6Unspecified(), Port: 30080, Protocol: frontend.SCTP, Node: true},
	} {
		if got, reason, err := RefusalOf(Refusal(want, "no capacity")); err != nil || got != want || reason != "no capacity" {
			t.Errorf("the refusal of %v is %v, %q, %v", want, got, reason, err)
		}
	}
}

// TestMalformedStepsAreNamed sends steps without a key. The reader ends the stream, because a refusal needs a key.
func TestMalformedStepsAreNamed(t *testing.T) {
	key := func(change func(*loadbalancerv1.FrontendKey)) *loadbalancerv1.FrontendStep {
		k := Key(serviceKey())
		change(k)
		return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Remove{Remove: k}}
	}
	barrier := func(b *loadbalancerv1.Barrier) *loadbalancerv1.FrontendStep {
		return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Barrier{Barrier: b}}
	}
	for want, bad := range map[string]*loadbalancerv1.FrontendStep{
		`remove: malformed: address: "web"`: key(func(k *loadbalancerv1.FrontendKey) { k.Address = "web" }),
		"IPv4 address in IPv6 form":         key(func(k *loadbalancerv1.FrontendKey) { k.Address = "::ffff:10.96.0.1" }),
		"remove: malformed: port 0":         key(func(k *loadbalancerv1.FrontendKey) { k.Port = 0 }),
		"remove: malformed: port 65536":     key(func(k *loadbalancerv1.FrontendKey) { k.Port = 65536 }),
		"remove: invalid frontend: protocol 1": key(func(k *loadbalancerv1.FrontendKey) {
			k.Protocol = netv1.Protocol_PROTOCOL_ICMP
		}),
		"remove: malformed: protocol 262":           key(func(k *loadbalancerv1.FrontendKey) { k.Protocol = 262 }),
		"neither an address nor a family":           key(func(k *loadbalancerv1.FrontendKey) { k.Address = "" }),
		"remove: invalid frontend: address 0.0.0.0": key(func(k *loadbalancerv1.FrontendKey) { k.Address = "0.0.0.0" }),
		"a step that this version does not know":    {},
		"barrier: malformed: incarnation":           barrier(&loadbalancerv1.Barrier{State: []byte("state")}),
		"barrier: malformed: state":                 barrier(&loadbalancerv1.Barrier{Incarnation: []byte("run")}),
		"upsert: malformed: port 0": {
			Step: &loadbalancerv1.FrontendStep_Upsert{Upsert: &loadbalancerv1.Frontend{}},
		},
	} {
		got, err := StepsOf([]*loadbalancerv1.FrontendStep{Step(everyStep()[4]), bad})
		if err == nil {
			t.Errorf("%s: read as %+v", want, got)
		} else if text := err.Error(); !strings.HasPrefix(text, "steps[1]: ") || !strings.Contains(text, want) {
			t.Errorf("the error is %q, want %q", text, want)
		} else if !errors.Is(err, ErrMalformed) && !errors.Is(err, frontend.ErrInvalid) {
			t.Errorf("%s: the error %v is neither ErrMalformed nor ErrInvalid", want, err)
		}
	}
}

// TestMalformedFrontendIsRefused sends malformed frontends with a key: the other frontends of the message are read.
func TestMalformedFrontendIsRefused(t *testing.T) {
	for want, change := range map[string]func(*loadbalancerv1.Frontend){
		"malformed: kind 9": func(f *loadbalancerv1.Frontend) { f.Kind = 9 },
		`inside: backends[0]: malformed: backend "localhost" port 5353`: func(f *loadbalancerv1.Frontend) {
			f.Inside.Backends[0].Address = "localhost"
		},
		`inside: backends[1]: malformed: backend "10.244.0.2" port 65536`: func(f *loadbalancerv1.Frontend) {
			f.Inside.Backends[1].Port = 65536
		},
		`outside: draining[0]: malformed: backend "10.244.0.3" port 0`: func(f *loadbalancerv1.Frontend) {
			f.Outside.Draining[0].Port = 0
		},
		"inside: malformed: algorithm 7":  func(f *loadbalancerv1.Frontend) { f.Inside.Algorithm = 7 },
		`malformed: source range "local"`: func(f *loadbalancerv1.Frontend) { f.SourceRanges[0] = "local" },
		"backend 10.244.0.0:5353 is out of order or a duplicate": func(f *loadbalancerv1.Frontend) {
			f.Inside.Backends[1].Address = "10.244.0.0"
		},
		"backend 10.244.0.3:5353 is draining and also gets new connections": func(f *loadbalancerv1.Frontend) {
			f.Outside.Backends = f.Outside.GetDraining()[:1]
		},
		"affinity 24h0m1s":                      func(f *loadbalancerv1.Frontend) { f.AffinitySeconds = 24*3600 + 1 },
		"neither an inside nor an outside list": func(f *loadbalancerv1.Frontend) { f.Inside, f.Outside = nil, nil },
	} {
		bad := Frontend(everyStep()[0].Upsert)
		change(bad)
		got, err := StepsOf([]*loadbalancerv1.FrontendStep{
			{Step: &loadbalancerv1.FrontendStep_Upsert{Upsert: bad}}, Step(everyStep()[1]),
		})
		switch {
		case err != nil || got[0].Refuse == nil || got[0].Refuse.Key != serviceKey():
			t.Errorf("%s: read as %+v, %v", want, got, err)
		case !strings.Contains(got[0].Refuse.Err.Error(), want):
			t.Errorf("the reason is %q, want %q", got[0].Refuse.Err, want)
		case !reflect.DeepEqual(got[1], everyStep()[1]):
			t.Errorf("%s: the next step is %+v", want, got[1])
		}
	}
}
