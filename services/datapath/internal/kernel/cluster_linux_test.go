// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// noStrangers is a table that denies peers of identity class 8 and allows all others, including unknown ones.
const noStrangers = nodetable.ID(46)

func (th *theatre) putNoStrangers(t *testing.T) {
	t.Helper()
	rawTable{
		id: noStrangers, header: bpf.MapsSlTable{PeerSet: uint32(noStrangers)}, rules: []uint8{actAllow, actDeny},
		classes: []map[uint32]uint32{{lastHi: rules(noAdmin, 1)}, {lastHi: rules(noAdmin, 2)}},
	}.put(t, th.k)
	must(t, "know strangers", th.k.Pins.Map(bpf.MapsMapSlPeer).Update(
		bpf.MapsSlPeerKey{PeerSet: uint32(noStrangers), NodeClass: 8}, uint32(1), ebpf.UpdateAny))
}

// announced sets the cluster's information about a prefix around an actor's address, shorter by the given
// number of bits.
func announced(who string, bits int, id identity.Numeric, node uint16) act {
	return change(func(t *testing.T, th *theatre) {
		r := ipcache.Remote{Identity: id, Node: node}
		must(t, "SetRemote", th.k.IPCache.SetRemote(around(t, th.addr(who), bits), r))
	})
}

func withdrawn(who string, bits int) act {
	return change(func(t *testing.T, th *theatre) {
		must(t, "RemoveRemote", th.k.IPCache.RemoveRemote(around(t, th.addr(who), bits)))
	})
}

func clusterPlays(t *testing.T, plays map[string][]act) {
	for name, acts := range plays {
		for _, v6 := range []bool{false, true} {
			t.Run(name+map[bool]string{false: " over IPv4", true: " over IPv6"}[v6], func(t *testing.T) {
				th := newTheatre(t, v6)
				th.putTables(t)
				th.putNoStrangers(t)
				th.play(t, acts)
			})
		}
	}
}

// TestKernelAddressBelowARangeIsJudgedAgain shows that a flow with an unknown pod of another node is evaluated
// again when the pod's identity becomes known, and again when the identity is removed.
func TestKernelAddressBelowARangeIsJudgedAgain(t *testing.T) {
	dns := datagram(4000, 80)
	clusterPlays(t, map[string][]act{
		"denied": {
			policy("a", noStrangers, nodetable.Allow),
			announced("world", 8, identity.UnknownInCluster, 2),
			say("a", "world", dns, event.ForwardedOutside),
			say("a", "world", dns, event.ForwardedOutside).check(reported(0, 0)),
			announced("world", 0, stranger, 2),
			say("a", "world", dns, event.PolicyDenied),
			withdrawn("world", 0),
			say("a", "world", dns, event.ForwardedOutside),
		},
		"a segment of an open connection": {
			policy("a", noStrangers, nodetable.Allow),
			announced("world", 8, identity.UnknownInCluster, 2),
			say("a", "world", segment(4000, 80, flagSYN), event.ForwardedOutside),
			say("world", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedFromStack).forwarded(),
			say("a", "world", segment(4000, 80, flagACK), event.ForwardedOutside),
			announced("world", 0, stranger, 2),
			say("a", "world", segment(4000, 80, flagACK), event.PolicyDenied),
		},
		"the range comes later": {
			policy("a", nodetable.Allow, nodetable.Allow),
			announced("world", 0, friend, 2),
			say("a", "world", dns, event.ForwardedOutside),
			announced("world", 8, identity.UnknownInCluster, 2),
			say("a", "world", dns, event.ForwardedOutside).check(reported(0, 0)),
		},
	})
}

// TestKernelMovedAddressNeverKeepsAVerdict moves an address to another identity, and to another node with the
// same identity: the next packet is evaluated again.
func TestKernelMovedAddressNeverKeepsAVerdict(t *testing.T) {
	dns := datagram(4000, 80)
	clusterPlays(t, map[string][]act{
		"other identity": {
			policy("a", friends, nodetable.Allow),
			announced("world", 0, friend, 2),
			say("a", "world", dns, event.ForwardedOutside),
			announced("world", 0, stranger, 2),
			say("a", "world", dns, event.PolicyDenied),
		},
		"other node": {
			policy("a", friends, nodetable.Allow),
			announced("world", 0, friend, 2),
			say("a", "world", dns, event.ForwardedOutside),
			say("a", "world", dns, event.ForwardedOutside).check(reported(0, 0)),
			announced("world", 0, friend, 3),
			say("a", "world", dns, event.ForwardedOutside).check(reported(1, 0)),
			say("a", "world", dns, event.ForwardedOutside).check(reported(0, 0)),
		},
		"the node has another number": {
			policy("a", friends, nodetable.Allow),
			announced("world", 0, friend, 2),
			say("a", "world", dns, event.ForwardedOutside),
			change(func(t *testing.T, th *theatre) { must(t, "Renumber", th.k.IPCache.Renumber(2, 9)) }),
			say("a", "world", dns, event.ForwardedOutside).check(reported(1, 0)),
		},
		"other identity, from the stack": {
			policy("a", nodetable.Allow, friends),
			announced("world", 0, friend, 2),
			say("world", "a", dns, event.ForwardedFromStack).forwarded(),
			announced("world", 0, stranger, 3),
			say("world", "a", dns, event.PolicyDenied).forwarded(),
		},
	})
}

// TestKernelIdentityBeforeAddress proves INV-53 for addresses of other nodes: while the tables do not include its
// identity, an address belongs to an unknown pod, and it does so again before the tables lose the identity.
func TestKernelIdentityBeforeAddress(t *testing.T) {
	dns := datagram(4000, 80)
	gate := func(ids ...identity.Numeric) act {
		return change(func(t *testing.T, th *theatre) { must(t, "Gate", th.k.IPCache.Gate(ids)) })
	}
	holds := func(id identity.Numeric) func(*testing.T, *theatre) {
		return func(t *testing.T, th *theatre) {
			want := ipmap.Info{Identity: id, Node: 2}
			if got, _, err := th.k.Addresses.Match(th.addr("world")); err != nil || got != want {
				t.Errorf("the ipcache has %+v, %v, want %+v", got, err, want)
			}
		}
	}
	clusterPlays(t, map[string][]act{
		"": {
			policy("a", friends, nodetable.Allow),
			gate(),
			announced("world", 8, identity.UnknownInCluster, 2),
			announced("world", 0, friend, 2),
			say("a", "world", dns, event.IdentityUnknown).check(holds(identity.UnknownInCluster)),
			change(func(t *testing.T, th *theatre) { must(t, "Known", th.k.IPCache.Known(friend)) }),
			say("a", "world", dns, event.ForwardedOutside).check(holds(friend)),
			change(func(t *testing.T, th *theatre) { must(t, "Unknown", th.k.IPCache.Unknown(friend)) }),
			say("a", "world", dns, event.IdentityUnknown).check(holds(identity.UnknownInCluster)),
			announced("world", 0, friend, 2),
			change(func(t *testing.T, th *theatre) { must(t, "Known", th.k.IPCache.Known(friend)) }),
			say("a", "world", dns, event.ForwardedOutside).check(holds(friend)),
		},
	})
}

// TestKernelWhatTheClusterSaidOutlivesAStart proves INV-82: a process starts while its source is unavailable, on a node
// whose own addresses have changed. The mappings of the cluster stay.
func TestKernelWhatTheClusterSaidOutlivesAStart(t *testing.T) {
	th := newTheatre(t, false)
	remote := []ipmap.Entry{
		{Prefix: netip.MustParsePrefix("10.9.0.0/24"), Info: ipmap.Info{Identity: identity.UnknownInCluster, Node: 1}},
		{Prefix: netip.MustParsePrefix("10.9.0.5/32"), Info: ipmap.Info{Identity: friend, Node: 1}},
		{
			Prefix: netip.MustParsePrefix("192.0.2.5/32"),
			Info:   ipmap.Info{Identity: identity.MinNodeLocal, Flags: ipmap.Outside},
		},
	}
	for _, e := range remote {
		must(t, "SetRemote", th.k.IPCache.SetRemote(e.Prefix, ipcache.Remote{Identity: e.Identity, Node: e.Node}))
	}
	want, err := th.k.Addresses.List()
	must(t, "List", err)
	must(t, "Close", th.k.Close())
	k := openKernel(t, testOptions(th.k.opened.Dir))
	got, err := k.Addresses.List()
	must(t, "List", err)
	if len(got) != len(want) {
		t.Errorf("after a start: %v, want %v", got, want)
	}
	for _, e := range remote {
		if info, found, err := k.Addresses.Match(e.Prefix.Addr()); err != nil || !found || info != e.Info {
			t.Errorf("%v after a start: %+v, %v, want %+v", e.Prefix, info, err, e.Info)
		}
	}
	must(t, "Keep", k.IPCache.Keep(func(netip.Prefix) bool { return false }))
	if info, found, err := k.Addresses.Match(netip.MustParseAddr("10.9.0.5")); err != nil || found {
		t.Errorf("after a snapshot without it: %+v, %v, %v", info, found, err)
	}
}
