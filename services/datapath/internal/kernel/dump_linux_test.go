// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

func dump(t testing.TB, k *Kernel, name string) []string {
	t.Helper()
	var lines []string
	err := k.Dump(name, func(key, value string) error {
		lines = append(lines, key+": "+value)
		return nil
	})
	if err != nil {
		t.Fatalf("Dump(%q): %v", name, err)
	}
	return lines
}

func TestKernelEveryMapCanBeDumped(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	for _, name := range k.MapNames() {
		dump(t, k, name)
	}
	if len(dumpers) != len(k.MapNames()) {
		t.Errorf("words for %d maps, there are %d", len(dumpers), len(k.MapNames()))
	}
	err := k.Dump("sl_nothing", func(string, string) error { return nil })
	if !errors.Is(err, pin.ErrNoMap) || !strings.Contains(err.Error(), "sl_ct4, sl_ct6") {
		t.Errorf("a map that does not exist: %v", err)
	}
	if err := k.Endpoints.Unpublish(e.Slot); err != nil {
		t.Fatal(err)
	}
	got := dump(t, k, "sl_ep")
	if len(got) != 2 || !strings.HasPrefix(got[0], "0: egress") || !strings.HasPrefix(got[1], "1: deleted: egress table 0 ingress table 0") {
		t.Errorf("the slot of a deleted endpoint: %q", got)
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	if err := k.Dump("sl_ep", func(string, string) error { return nil }); !errors.Is(err, pin.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestKernelDumpIsInWords(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	put := func(name string, key, value any) {
		t.Helper()
		if err := k.Pins.Map(name).Update(key, value, ebpf.UpdateAny); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	set := binary.NativeEndian.Uint32([]byte{0, 0, 0, 9})
	put(bpf.MapsMapSlTable, uint32(16), &bpf.MapsSlTable{
		PeerSet: 1, CidrSet: 2, ClassBase: 3, RuleBase: 4, N_class: 5, N_rule: 6, Flags: 5,
		DefClass: [8]uint16{1, 2, 3, 4, 5, 6, 7, 8}, AddrDef: [3]uint16{9, 10, 11},
	})
	put(bpf.MapsMapSlId, uint32(300), uint32(1<<31|2<<24|3<<16|7))
	put(bpf.MapsMapSlId, uint32(65536+5), uint32(1<<31|9))
	put(bpf.MapsMapSlPeer, &bpf.MapsSlPeerKey{PeerSet: 1, NodeClass: 7}, uint32(4))
	put(bpf.MapsMapSlCidr4, &bpf.MapsSlCidrKey4{Bits: 32 + 8, Set: set, Addr: [4]byte{10}}, &bpf.MapsSlCidr{Class: [3]uint16{1, 2, 3}})
	put(bpf.MapsMapSlCidr6, &bpf.MapsSlCidrKey6{Bits: 32 + 16, Set: set, Addr: [16]byte{0xfd}}, &bpf.MapsSlCidr{Class: [3]uint16{4, 5, 6}})
	put(bpf.MapsMapSlClass, uint32(3), uint32(8))
	node := bpf.MapsSlPortNode{}
	for i := range node.Hi {
		node.Hi[i], node.Val[i] = 0xffffffff, 0x7fffffff
	}
	node.Hi[0], node.Val[0] = 6<<16|79, 0x7fff0002
	node.Hi[1], node.Val[1] = 6<<16|80, 1<<31|12
	node.Hi[2], node.Val[2] = 17<<16|53, 3<<16|0xffff
	put(bpf.MapsMapSlPorts, uint32(8), &node)
	put(bpf.MapsMapSlRule, uint32(4), &bpf.MapsSlRule{Action: 1, Tier: 1, Redirect: 2})
	put(bpf.MapsMapSlClassKey, uint32(7), &bpf.MapsSlClassKey{Key: [16]byte{0xab, 15: 0xcd}})
	put(bpf.MapsMapSlTableKey, uint32(16), &bpf.MapsSlTableKey{Hash: [32]byte{0xef, 31: 0x01}})
	put(bpf.MapsMapSlBudget, uint32(2), &bpf.MapsSlBudget{Begun: 3, Limit: 5})
	put(bpf.MapsMapSlBudget, uint32(conntrack.Outside<<1|1), &bpf.MapsSlBudget{Begun: 77<<32 | 5, Limit: 5})
	put(bpf.MapsMapSlPgen, uint32(77), uint64(2))
	put(bpf.MapsMapSlFrag, &bpf.MapsSlFragment{Src: [16]byte{10, 0, 0, 1}, Dst: [16]byte{10, 0, 0, 2}, Id: 5, Proto: 17, Family: 4, Slot: 1}, uint32(1000<<16|53))
	k.addStat(t, uint32(bpf.MapsSlCtStatSL_CT_STAT_PICKED_UP), 4)
	k.put(t, conntrack.Connection{
		Tuple: tuple(6, "10.244.0.20:80", "10.244.0.10:4000"), From: conntrack.End{Slot: endpointmap.NoID, Identity: 9}, To: conntrack.End{Slot: 1, Epoch: 2, AddressEpoch: 3, Identity: 266},
		LastSeen: conntrack.MonotonicSeconds(), Flags: conntrack.SeenReply | conntrack.Established | conntrack.ViaStack, IngressRule: 8,
	})
	k.put(t, conntrack.Connection{Tuple: tuple(17, "[fd00::1]:5", "[fd00::2]:53"), From: conntrack.End{Slot: endpointmap.NoID}, To: conntrack.End{Slot: endpointmap.NoID}, LastSeen: conntrack.MonotonicSeconds()})

	transit := conntrack.Connection{
		Tuple: tuple(17, "192.0.2.99:41000", "203.0.113.1:53"), From: conntrack.End{Slot: endpointmap.NoID, Identity: 9},
		To: conntrack.End{Slot: endpointmap.NoID, Identity: 9}, LastSeen: conntrack.MonotonicSeconds(),
	}
	transit.Transit = true
	value := conntrack.ValueOf(transit)
	value.NatPort, value.NatAddress = 24711, 3
	put(bpf.MapsMapSlCt4, transit.Key4(), &value)

	for name, want := range map[string][]string{
		"sl_if":    {"device 1: slot 1"},
		"sl_ip4":   {"10.244.0.10: slot 1"},
		"sl_ip6":   {"fd00:244::a: slot 1"},
		"sl_ipc4":  {"10.244.0.10/32: identity 266", "10.244.0.0/24: identity 255 pod-range"},
		"sl_ipc6":  {"fd00:244::a/128: identity 266", "fd00:244::/64: identity 255 pod-range"},
		"sl_gen":   {fmt.Sprintf("0: %d", e.Policy.Epoch)},
		"sl_table": {"16: peer set 1 address set 2 classes 5 from 3 rules 6 from 4 default-allow addresses default classes in-cluster=1 world-ipv4=2 world-ipv6=3 host=4 remote-node=5 kube-apiserver=6 unknown=7 other=8 address classes cluster=9 node=10 outside=11"},
		"sl_id": {
			"identity 300: identity class 7 kind host scope outside", "identity 16711685: identity class 9 kind in-cluster scope cluster",
		},
		"sl_peer":      {"set 1 identity class 7: class 4"},
		"sl_cidr4":     {"set 9 10.0.0.0/8: cluster class 1 identity class 2 outside class 3"},
		"sl_cidr6":     {"set 9 fd00::/16: cluster class 4 identity class 5 outside class 6"},
		"sl_class":     {"3: node 8"},
		"sl_ports":     {"8: to 6/79 rule 2, to 6/80 node 12, to 17/53 admin rule 3, to 65535/65535 no rule"},
		"sl_rule":      {"4: redirect tier normal proxy 2"},
		"sl_class_key": {"7: ab0000000000000000000000000000cd"},
		"sl_table_key": {"16: ef00000000000000000000000000000000000000000000000000000000000001"},
		"sl_budget":    {"1 IPv4: used 3 limit 5", "outside IPv6: used 5 limit 5 used up at 77 s"},
		"sl_frag":      {"protocol 17 10.0.0.1 10.0.0.2 id 5 slot 1: ports 1000 53"},
		"sl_ct_stats":  {"picked-up: 4"},
	} {
		got := dump(t, k, name)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s\n got %q\nwant %q", name, got, want)
		}
	}
	// The others moved when the ranges of pods came.
	if got := dump(t, k, "sl_pgen"); !slices.Contains(got, "77: 2") {
		t.Errorf("sl_pgen\n got %q\nwant 77: 2 in it", got)
	}
	for name, want := range map[string]string{
		"sl_ep": `^1: egress table 1 ingress table 1 epoch \d+ device 1 identity 266 10.244.0.10 fd00:244::a mac 02:00:00:00:01:0a host mac 02:00:00:00:02:0a mtu 1500 deliver peer$`,
		"sl_ct4": `^protocol 6 10.244.0.10:4000 10.244.0.20:80: begun by the second established via-stack, idle \d+ s, ` +
			`initiator identity 9 responder identity 266 slot 1 epoch 2 rule 8 address epoch 3$`,
		"sl_ct6": `^protocol 17 \[fd00::1\]:5 \[fd00::2\]:53: begun by the first opening, idle \d+ s, initiator identity 0 responder identity 0$`,
	} {
		if got := dump(t, k, name); !slices.ContainsFunc(got, regexp.MustCompile(want).MatchString) {
			t.Errorf("%s\n got %q\nwant %s", name, got, want)
		}
	}
	if got, want := dump(t, k, "sl_ct4"), regexp.MustCompile(`^protocol 17 192.0.2.99:41000 203.0.113.1:53 in transit: `+
		`.* source port 24711 at place 2 of sl_own$`); !slices.ContainsFunc(got, want.MatchString) {
		t.Errorf("sl_ct4\n got %q\nwant %s", got, want)
	}
}

func TestKernelDumpOfServicesIsInWords(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services = true
	k := openKernel(t, o)
	list := func(backends ...string) *frontend.List {
		l := &frontend.List{Drop: true}
		for _, b := range backends {
			l.Backends = append(l.Backends, frontend.Backend{AddrPort: netip.MustParseAddrPort(b)})
		}
		return l
	}
	tx := &frontendtx.Transaction{}
	tx.Upsert(&frontend.Frontend{
		Key:  frontend.Key{Addr: netip.MustParseAddr("10.96.0.10"), Port: 53, Protocol: frontend.UDP},
		Kind: frontend.ClusterIP, Service: "kube-system/dns", Affinity: time.Hour,
		Inside: &frontend.List{Backends: list("10.244.0.5:53", "10.244.0.6:53").Backends},
	})
	tx.Upsert(&frontend.Frontend{
		Key:  frontend.Key{Addr: netip.IPv6Unspecified(), Port: 30080, Protocol: frontend.TCP, Node: true},
		Kind: frontend.NodePort, Service: "shop/web", Inside: list("[fd00:244::9]:80"), Outside: list(),
	})
	res, err := k.Services.Apply(t.Context(), tx)
	if err != nil || len(res.Refused) > 0 {
		t.Fatalf("Apply: %+v, %v", res, err)
	}
	for name, values := range map[string][2]any{
		bpf.MapsMapSlNs: {uint64(4026531840), bpf.MapsSlNs{Slot: 3, Flags: 1}},
		bpf.MapsMapSlAff4: {
			bpf.MapsSlAffKey4{Client: binary.NativeEndian.Uint32([]byte{10, 244, 0, 10}), Group: 1}, uint64(2) | 77<<32,
		},
		bpf.MapsMapSlAff6:    {bpf.MapsSlAffKey6{Client: netip.MustParseAddr("fd00::1").As16(), Group: 1}, uint64(1) | 78<<32},
		bpf.MapsMapSlPodAff6: {bpf.MapsSlAffKey6{Group: 2}, uint64(3) | 79<<32},
	} {
		if err := k.Pins.Map(name).Update(values[0], values[1], ebpf.UpdateAny); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	for name, want := range map[string][]string{
		"sl_fe4": {"10.96.0.10, of services alone: no front", "10.96.0.10:53/udp: inside front 1 outside front 1"},
		"sl_fe6": {"node port [::]:30080/tcp: inside front 2 outside front 3"},
		"sl_front": {
			"1: port 53 address 10.96.0.10, members 0 to 1, affinity 3600 s group 1",
			"2: port 30080 address 0.0.0.0, members 2 to 2, drops without a backend",
			"3: port 30080 address 0.0.0.0, no backend, drops without a backend",
		},
		"sl_be4":  {"1: 10.244.0.5:53 active generation 0", "2: 10.244.0.6:53 active generation 0"},
		"sl_be6":  {"1: [fd00:244::9]:80 active generation 0"},
		"sl_ns":   {"namespace 4026531840: slot 3 flags 0x1"},
		"sl_aff4": {"10.244.0.10 group 1: backend 2 generation 0 last used at 77 s"},
		"sl_aff6": {"fd00::1 group 1: backend 1 generation 0 last used at 78 s"},

		"sl_pod_aff6": {":: group 2: backend 3 generation 0 last used at 79 s"},
	} {
		got := dump(t, k, name)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s\n got %q\nwant %q", name, got, want)
		}
	}
	members := dump(t, k, "sl_member")
	if len(members) != 3 || !regexp.MustCompile(`^0: backend 1 salt 0x[0-9a-f]+$`).MatchString(members[0]) {
		t.Errorf("sl_member: %q", members)
	}
}

func TestKernelDumpEndsWithItsVisitor(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	k.putAll(t, remotes(e, 6, 0, 10_000, conntrack.SeenReply, 1))
	if got := dump(t, k, "sl_ct4"); len(got) != 10_000 {
		t.Errorf("%d entries, want 10,000", len(got))
	}
	gone := errors.New("the reader is gone")
	visits := 0
	err := k.Dump("sl_ct4", func(string, string) error {
		if visits++; visits == 4097 {
			return gone
		}
		return nil
	})
	if !errors.Is(err, gone) || visits != 4097 {
		t.Errorf("the visitor's error after %d visits: %v", visits, err)
	}
	// a slow visitor holds nobody up
	err = k.Dump("sl_ct4", func(string, string) error {
		if _, err := k.Endpoints.Publish(t.Context(), b); err != nil {
			return err
		}
		return gone
	})
	if !errors.Is(err, gone) {
		t.Errorf("a change while a visitor is busy: %v", err)
	}
}

func TestAuditFlagIsThatOfTheHeader(t *testing.T) {
	header, err := os.ReadFile("../../../../bpf/include/sluice/abi.h")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(header), fmt.Sprintf("#define SL_EP_AUDIT %#x ", endpointmap.AuditBit)) {
		t.Errorf("SL_EP_AUDIT is not %#x", endpointmap.AuditBit)
	}
}
