// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package xfrm

import (
	"context"
	"net"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

func TestMain(m *testing.M) {
	// netnstest.New leaves its thread in the new namespace, which must not be the main thread.
	runtime.LockOSThread()
	leaktest.Main(m)
}

// TestKernelPoliciesAreCountedAndWatched adds and removes policies in a namespace.
func TestKernelPoliciesAreCountedAndWatched(t *testing.T) {
	home := netnstest.New(t)
	r := New(home)
	if p, err := r.Policies(); err != nil || p.Any() {
		t.Fatalf("of a new namespace: %+v, %v", p, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	news, ended := make(chan struct{}, 64), make(chan error, 1)
	go func() { ended <- r.Watch(ctx, func() { news <- struct{}{} }) }()
	<-news

	_, pods, err := net.ParseCIDR("10.244.0.0/16")
	if err != nil {
		t.Fatal(err)
	}
	policy := func(dir netlink.Dir, action netlink.PolicyAction, ifid int) *netlink.XfrmPolicy {
		p := &netlink.XfrmPolicy{Dst: pods, Dir: dir, Action: action, Ifid: ifid}
		if ifid != 0 {
			p.Tmpls = []netlink.XfrmPolicyTmpl{{
				Src: net.IPv4(192, 0, 2, 1), Dst: net.IPv4(192, 0, 2, 2),
				Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL,
			}}
		}
		return p
	}
	change := func(what func(*netlink.XfrmPolicy) error, p *netlink.XfrmPolicy) {
		t.Helper()
		if err := home.Do(func() error { return what(p) }); err != nil {
			t.Fatal(err)
		}
		<-news
	}
	wants := func(want Policies) {
		t.Helper()
		if p, err := r.Policies(); err != nil || p != want {
			t.Errorf("%+v, %v, want %+v", p, err, want)
		}
	}
	change(netlink.XfrmPolicyAdd, policy(netlink.XFRM_DIR_OUT, netlink.XFRM_POLICY_ALLOW, 0))
	wants(Policies{})
	change(netlink.XfrmPolicyAdd, policy(netlink.XFRM_DIR_OUT, netlink.XFRM_POLICY_ALLOW, 7))
	wants(Policies{})
	if p, err := r.Policies(); err != nil || p.OfNode() != "" {
		t.Errorf("policies of the node: %q, %v", p.OfNode(), err)
	}
	in := policy(netlink.XFRM_DIR_IN, netlink.XFRM_POLICY_BLOCK, 0)
	change(netlink.XfrmPolicyAdd, in)
	wants(Policies{In: 1})
	if p, err := r.Policies(); err != nil || p.OfNode() != "xfrm policies: 1 in" || p.Any() {
		t.Errorf("policies of the node: %q, %v, and of forwarded packets: %v", p.OfNode(), err, p)
	}
	change(netlink.XfrmPolicyDel, in)
	change(netlink.XfrmPolicyUpdate, policy(netlink.XFRM_DIR_OUT, netlink.XFRM_POLICY_BLOCK, 0))
	wants(Policies{Out: 1})
	change(netlink.XfrmPolicyAdd, policy(netlink.XFRM_DIR_FWD, netlink.XFRM_POLICY_BLOCK, 0))
	wants(Policies{Out: 1, Forward: 1})
	change(netlink.XfrmPolicyDel, policy(netlink.XFRM_DIR_OUT, netlink.XFRM_POLICY_BLOCK, 0))
	wants(Policies{Forward: 1})

	cancel()
	servicetest.Eventually(t, "the end of the watch", func() bool { return len(ended) > 0 })
}
