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

// timeless replaces relative times by N.
func timeless(lines []string) []string {
	for i, line := range lines {
		lines[i] = regexp.MustCompile(`-?\d+ s ago`).ReplaceAllString(line, "N s ago")
	}
	return lines
}

func TestKernelEveryMapCanBeDumped(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	names := k.MapNames()
	compiled, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	for name := range compiled.Maps {
		if strings.HasPrefix(name, "sl_prev") {
			continue // of the previous version; this node has none
		}
		if !strings.HasPrefix(name, ".") && !slices.Contains(names, name) {
			t.Errorf("%s is compiled, but is not among the node's %d maps", name, len(names))
		}
	}
	for _, name := range names {
		dump(t, k, name)
	}
	err = k.Dump("sl_nothing", func(string, string) error { return nil })
	if !errors.Is(err, pin.ErrNoMap) || !strings.Contains(err.Error(), "sl_ct4, sl_ct6") {
		t.Errorf("a map that does not exist: %v", err)
	}
	if err := k.Endpoints.Unpublish(e.Slot); err != nil {
		t.Fatal(err)
	}
	got := dump(t, k, "sl_ep")
	if len(got) != 2 || !strings.HasPrefix(got[0], "endpoint 0: egress 1") || !strings.HasPrefix(got[1], "endpoint 1: deleted: epoch ") {
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
	put(bpf.MapsMapSlRule, uint32(4), &bpf.MapsSlRule{Action: 1, Tier: 1, Redirect: 1, Flags: 1<<16 | 7})
	put(bpf.MapsMapSlClassKey, uint32(7), &bpf.MapsSlClassKey{Key: [16]byte{0xab, 15: 0xcd}})
	put(bpf.MapsMapSlTableKey, uint32(16), &bpf.MapsSlTableKey{Hash: [32]byte{0xef, 31: 0x01}})
	put(bpf.MapsMapSlBudget, uint32(2), &bpf.MapsSlBudget{Begun: 3, Limit: 5})
	put(bpf.MapsMapSlBudget, uint32(conntrack.Outside<<1|1), &bpf.MapsSlBudget{Begun: 77<<32 | 5, Limit: 5})
	put(bpf.MapsMapSlPgen, uint32(77), uint64(2))
	put(bpf.MapsMapSlFrag, &bpf.MapsSlFragment{Src: [16]byte{10, 0, 0, 1}, Dst: [16]byte{10, 0, 0, 2}, Id: 5, Proto: 17, Family: 4, Slot: 1}, uint32(1000<<16|53))
	k.addStat(t, uint32(bpf.MapsSlCtStatSL_CT_STAT_PICKED_UP), 4)
	k.put(t, conntrack.Connection{
		Tuple: tuple(6, "10.244.0.20:80", "10.244.0.10:4000"), From: conntrack.End{Slot: endpointmap.NoID, Identity: 9},
		To:       conntrack.End{Slot: 1, Epoch: 2, AddressEpoch: 3, Identity: 266},
		LastSeen: conntrack.MonotonicSeconds(), Flags: conntrack.SeenReply | conntrack.Established | conntrack.ViaStack, IngressRule: 8,
	})
	k.put(t, conntrack.Connection{
		Tuple: tuple(17, "[fd00::1]:5", "[fd00::2]:53"), From: conntrack.End{Slot: endpointmap.NoID},
		To: conntrack.End{Slot: endpointmap.NoID}, LastSeen: conntrack.MonotonicSeconds(),
	})

	transit := conntrack.Connection{
		Tuple: tuple(17, "192.0.2.99:41000", "203.0.113.1:53"), From: conntrack.End{Slot: endpointmap.NoID, Identity: 9},
		To: conntrack.End{Slot: endpointmap.NoID, Identity: 9}, LastSeen: conntrack.MonotonicSeconds(),
	}
	transit.Transit = true
	value := conntrack.ValueOf(transit)
	value.NatPort, value.NatAddress = 24711, 3
	put(bpf.MapsMapSlCt4, transit.Key4(), &value)

	for name, want := range map[string][]string{
		"sl_if":    {"device 1: endpoint 1"},
		"sl_ip4":   {"10.244.0.10: endpoint 1"},
		"sl_ip6":   {"fd00:244::a: endpoint 1"},
		"sl_ipc4":  {"10.244.0.10/32: identity 266", "10.244.0.0/24: identity 255 pod-range"},
		"sl_ipc6":  {"fd00:244::a/128: identity 266", "fd00:244::/64: identity 255 pod-range"},
		"sl_gen":   {fmt.Sprintf("0: %d", e.Policy.Epoch)},
		"sl_table": {"16: peer_set 1 cidr_set 2 class_base 3 rule_base 4 n_class 5 n_rule 6 default-allow addresses def_class [1 2 3 4 5 6 7 8] addr_def [9 10 11]"},
		"sl_id": {
			"identity 300: class 7 kind host scope outside known", "identity 16711685: class 9 kind in-cluster scope cluster known",
		},
		"sl_peer":  {"peer_set 1 node_class 7: class 4"},
		"sl_cidr4": {"set 9 10.0.0.0/8: class [1 2 3]"},
		"sl_cidr6": {"set 9 fd00::/16: class [4 5 6]"},
		"sl_class": {"3: root 8"},
		"sl_ports": {"8: hi [proto 6 port 79, proto 6 port 80, proto 17 port 53, proto 65535 port 65535, ...] " +
			"val [rule 2, child admin 0 rule 12, admin 3, -, ...]"},
		"sl_rule":      {"4: action redirect tier normal redirect dns set 7 passes-away"},
		"sl_class_key": {"7: ab0000000000000000000000000000cd"},
		"sl_table_key": {"16: ef00000000000000000000000000000000000000000000000000000000000001"},
		"sl_budget":    {"endpoint 1 IPv4: begun 3 limit 5", "endpoint outside IPv6: begun 5 used-up N s ago limit 5"},
		"sl_frag":      {"src 10.0.0.1 dst 10.0.0.2 id 5 proto 17 slot 1: sport 1000 dport 53"},
		"sl_ct_stats":  {"picked-up: 4"},
	} {
		got := timeless(dump(t, k, name))
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s\n got %q\nwant %q", name, got, want)
		}
	}
	// The other epochs changed when the pod CIDRs were added.
	if got := dump(t, k, "sl_pgen"); !slices.Contains(got, "77: 2") {
		t.Errorf("sl_pgen\n got %q\nwant 77: 2 in it", got)
	}
	for name, want := range map[string]string{
		"sl_ep": `^endpoint 1: egress 1 ingress 1 epoch \d+ ifindex 1 identity 266 ip4 10.244.0.10 mtu 1500 deliver peer ` +
			`mac 02:00:00:00:01:0a hmac 02:00:00:00:02:0a ip6 fd00:244::a$`,
		"sl_ct4": `^lo 10.244.0.10:4000 hi 10.244.0.20:80 proto 6: responder-epoch 2 responder-endpoint 1 responder-address-epoch 3 ` +
			`id_init 9 id_resp 266 rule_in 8 last_s \d+ s ago seen-reply via-stack established$`,
		"sl_ct6": `^lo \[fd00::1\]:5 hi \[fd00::2\]:53 proto 17: last_s \d+ s ago begun-by-lo$`,
	} {
		if got := dump(t, k, name); !slices.ContainsFunc(got, regexp.MustCompile(want).MatchString) {
			t.Errorf("%s\n got %q\nwant %s", name, got, want)
		}
	}
	if got, want := dump(t, k, "sl_ct4"), regexp.MustCompile(`^lo 192.0.2.99:41000 hi 203.0.113.1:53 proto 17 zone transit: `+
		`.* nat_port 24711 nat_address 3 `); !slices.ContainsFunc(got, want.MatchString) {
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
		"sl_fe4": {"addr 10.96.0.10:0 proto 0 kind vip: 0", "addr 10.96.0.10:53 proto 17: inside 1 outside 1"},
		"sl_fe6": {"addr [::]:30080 proto 6 kind node-port: inside 2 outside 3"},
		"sl_front": {
			"1: count 2 timeout 3600 group 1 addr 10.96.0.10:53",
			"2: base 2 count 1 drops addr 0.0.0.0:30080",
			"3: drops addr 0.0.0.0:30080",
		},
		"sl_be4":  {"1: 10.244.0.5 port 53 active", "2: 10.244.0.6 port 53 active"},
		"sl_be6":  {"1: port 80 active addr fd00:244::9"},
		"sl_ns":   {"namespace 4026531840: slot 3 not-translated"},
		"sl_aff4": {"client 10.244.0.10 group 1: backend 2 last N s ago"},
		"sl_aff6": {"client fd00::1 group 1: backend 1 last N s ago"},

		"sl_pod_aff6": {"client :: group 2: backend 3 last N s ago"},
	} {
		got := timeless(dump(t, k, name))
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
	// a slow visitor delays no other call
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
