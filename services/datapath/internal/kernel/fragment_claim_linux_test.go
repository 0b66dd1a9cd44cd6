// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// seen contains the properties that the recorder distinguishes: the incoming device of a packet (0 if the host
// sent it), its mark, its EtherType, and the seventh byte of its IP header. For IPv6 that byte is the next
// header, for IPv4 it has the flags.
type seen struct{ Ingress, Mark, Protocol, Seventh uint32 }

// fragment reports whether it is a packet that a test has sent.
func (s seen) fragment() bool {
	return s.Protocol == etherIPv4 || s.Seventh == unix.IPPROTO_FRAGMENT || s.Seventh == unix.IPPROTO_DSTOPTS
}

// recorder counts the packets that the stack sends to a device, before our program sees them.
func recorder(t *testing.T, ifindex uint32) func() map[seen]uint64 {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 16, ValueSize: 8, MaxEntries: 256})
	must(t, "make a map", err)
	t.Cleanup(func() { m.Close() })
	const mark, protocol, ingress = 8, 16, 36 // of struct __sk_buff
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, ingress, asm.Word),
			asm.StoreMem(asm.RFP, -16, asm.R2, asm.Word),
			asm.LoadMem(asm.R2, asm.R1, mark, asm.Word),
			asm.StoreMem(asm.RFP, -12, asm.R2, asm.Word),
			asm.LoadMem(asm.R2, asm.R1, protocol, asm.Word),
			asm.StoreMem(asm.RFP, -8, asm.R2, asm.Word),
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(14+6, asm.Byte),
			asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -16),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "first"),
			asm.Mov.Imm(asm.R1, 1),
			asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
			asm.Ja.Label("next"),
			asm.Mov.Imm(asm.R1, 1).WithSymbol("first"),
			asm.StoreMem(asm.RFP, -24, asm.R1, asm.DWord),
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -16),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, -24),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("next"), // TC_ACT_UNSPEC: continue with the next program
			asm.Return(),
		},
	})
	must(t, "load the recorder", err)
	t.Cleanup(func() { prog.Close() })
	// The kernel puts a new filter before other filters of the same priority.
	must(t, "attach the recorder", netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: int(ifindex), Parent: netlink.HANDLE_MIN_EGRESS, Handle: 2, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: "recorder", DirectAction: true,
	}))
	return func() map[seen]uint64 {
		counts := map[seen]uint64{}
		var key seen
		var n uint64
		it := m.Iterate()
		for it.Next(&key, &n) {
			key.Protocol = uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, uint16(key.Protocol))))
			if key.fragment() {
				counts[key] = n
			}
		}
		must(t, "read the recorder", it.Err())
		return counts
	}
}

// forwardMark is the mark that the node's firewall gives to packets forwarded to a pod.
const forwardMark = 0x0100

// trackedAndMasqueraded makes the stack defragment and mark the packets that it forwards, and translates
// sources in a prefix to the host's address.
func trackedAndMasqueraded(t *testing.T, from netip.Prefix) {
	t.Helper()
	conn, err := nftables.New()
	must(t, "nftables", err)
	inet := conn.AddTable(&nftables.Table{Name: "tracked", Family: nftables.TableFamilyINet})
	forward := conn.AddChain(&nftables.Chain{
		Name: "forward", Table: inet, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
	})
	conn.AddRule(&nftables.Rule{Table: inet, Chain: forward, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Immediate{Register: 1, Data: binary.NativeEndian.AppendUint32(nil, forwardMark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}})
	four := conn.AddTable(&nftables.Table{Name: "masquerade", Family: nftables.TableFamilyIPv4})
	post := conn.AddChain(&nftables.Chain{
		Name: "post", Table: four, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	a := from.Addr().As4()
	conn.AddRule(&nftables.Rule{Table: four, Chain: post, Exprs: []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 3},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a[:3]},
		&expr.Masq{},
	}})
	must(t, "add the rules", conn.Flush())
	t.Cleanup(func() {
		conn.DelTable(inet)
		conn.DelTable(four)
		must(t, "delete the rules", conn.Flush())
	})
}

// fragments6 cuts a UDP datagram into IPv6 fragments of at most 1,280 bytes. The first one begins with the
// given number of bytes of destination options, which the others do not have.
func fragments6(src, dst netip.Addr, id uint32, dgram []byte, options int) (packets [][]byte) {
	const size = 1280 - 40 - 8
	for at := 0; at < len(dgram); {
		room, next, before := size, byte(unix.IPPROTO_FRAGMENT), []byte(nil)
		if at == 0 && options > 0 {
			const padN = 1
			before = make([]byte, options)
			before[0], before[1], before[2], before[3] = unix.IPPROTO_FRAGMENT, byte(options/8-1), padN, byte(options-4)
			room, next = size-options, unix.IPPROTO_DSTOPTS
		}
		end, more := min(at+room, len(dgram)), uint16(1)
		if end == len(dgram) {
			more = 0
		}
		head := binary.BigEndian.AppendUint16([]byte{unix.IPPROTO_UDP, 0}, uint16(at)|more)
		head = binary.BigEndian.AppendUint32(head, id)
		packets = append(packets, ip6(src, dst, next, slices.Concat(before, head, dgram[at:end])))
		at = end
	}
	return packets
}

func fragments4(src, dst netip.Addr, id uint16, dgram []byte, size int) (packets [][]byte) {
	const moreFragments = 0x2000
	for at := 0; at < len(dgram); at += size {
		end, more := min(at+size, len(dgram)), uint16(moreFragments)
		if end == len(dgram) {
			more = 0
		}
		p := ip4Header{src: src, dst: dst, proto: unix.IPPROTO_UDP, frag: uint16(at/8) | more}.with(dgram[at:end])
		binary.BigEndian.PutUint16(p[4:], id)
		p[10], p[11] = 0, 0
		sum := checksum(p[:20])
		p[10], p[11] = byte(sum>>8), byte(sum)
		packets = append(packets, p)
	}
	return packets
}

// fragmentNode is a node that forwards between an uplink and a pod with a smaller MTU, with connection
// tracking, so that it defragments and fragments.
type fragmentNode struct {
	runner
	pod     *pod
	outside netns.NsHandle
	uplink  netlink.Link
	record  func() map[seen]uint64
	sent    uint16
}

// outside4 is masqueraded.
var outside4 = netip.MustParseAddr("203.0.113.9")

func newFragmentNode(t *testing.T) *fragmentNode {
	t.Helper()
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	makeNode(t, k)
	n := &fragmentNode{runner: runner{k}, pod: newPodMTU(t, k, "sl-narrow", 20, endpointmap.DeliverPeer, 1280), outside: newNetns(t)}
	routeToPod(t, "sl-narrow", n.pod)
	n.uplink = newUplink(t)
	end, err := netlink.LinkByName("slup1")
	must(t, "find slup1", err)
	must(t, "move slup1 outside", netlink.LinkSetNsFd(end, int(n.outside)))
	uplink4 := netip.MustParseAddr("203.0.113.1")
	must(t, "address of the uplink", netlink.AddrAdd(n.uplink, &netlink.Addr{IPNet: &net.IPNet{IP: uplink4.AsSlice(), Mask: net.CIDRMask(24, 32)}}))
	must(t, "host addresses", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6, uplink4}))
	inNetns(t, n.outside, func() {
		end, err := netlink.LinkByName("slup1")
		if err == nil {
			err = netlink.LinkSetUp(end)
		}
		if err != nil {
			t.Errorf("set the other end up: %v", err)
		}
	})
	servicetest.Eventually(t, "carrier of the uplink", func() bool {
		l, err := netlink.LinkByName(n.uplink.Attrs().Name)
		return err == nil && l.Attrs().OperState == netlink.OperUp
	})
	trackedAndMasqueraded(t, netip.PrefixFrom(outside4, 24))
	n.record = recorder(t, n.pod.Ifindex)
	return n
}

// send sends a datagram from outside in fragments. It waits until the given number of fragments has reached the
// pod's device and returns what the recorder and the counters have counted. A fragment that our program drops
// ends the datagram.
func (n *fragmentNode) send(t *testing.T, src netip.Addr, options int, pieces uint64) (map[seen]uint64, map[event.Reason]uint64) {
	t.Helper()
	n.sent++
	dst := n.pod.IPv4
	if src.Is6() {
		dst = n.pod.IPv6
	}
	dgram := udp(4000, 53, make([]byte, 3400)...)
	sum := checksum(slices.Concat(src.AsSlice(), dst.AsSlice(), []byte{0, 0, byte(len(dgram) >> 8), byte(len(dgram)), 0, 0, 0, 17}, dgram))
	dgram[6], dgram[7] = byte(sum>>8), byte(sum)
	protocol, packets := uint16(etherIPv4), fragments4(src, dst, n.sent, dgram, 1480)
	if src.Is6() {
		protocol, packets = etherIPv6, fragments6(src, dst, uint32(n.sent), dgram, options)
	}
	before, counters := n.record(), n.counters(t)
	inNetns(t, n.outside, func() {
		for _, b := range packets {
			sendRaw(t, "slup1", frame([6]byte(n.uplink.Attrs().HardwareAddr), [6]byte{2, 0, 0, 0, 9, 2}, protocol, b))
		}
	})
	got, verdicts := map[seen]uint64{}, map[event.Reason]uint64{}
	servicetest.Eventually(t, "the fragments at the pod's device", func() bool {
		var arrived, evaluated uint64
		for s, c := range n.record() {
			if c > before[s] {
				got[s] = c - before[s]
			}
			arrived += got[s]
		}
		after := n.counters(t)
		for _, r := range []event.Reason{event.ForwardedFromStack, event.PolicyPending} {
			if c := (cell{r, event.Ingress}); after[c].Packets > counters[c].Packets {
				verdicts[r] = after[c].Packets - counters[c].Packets
			}
			evaluated += verdicts[r]
		}
		return arrived >= pieces && evaluated >= pieces
	})
	return got, verdicts
}

// TestKernelFragmentsOfForwardedPacketsAreNotTheHosts: packets that the stack forwards with an address of the host
// belong to the world. The programs identify them by the incoming device, which the stack keeps when it refragments
// IPv4 packets and when it sends the original fragments.
func TestKernelFragmentsOfForwardedPacketsAreNotTheHosts(t *testing.T) {
	n := newFragmentNode(t)
	for _, c := range []struct {
		name    string
		src     netip.Addr
		ingress nodetable.ID
		pieces  uint64
		reason  event.Reason
	}{
		{"IPv4, masqueraded", outside4, nodetable.Allow, 3, event.ForwardedFromStack},
		{"IPv4, masqueraded", outside4, nodetable.Pending, 1, event.PolicyPending},
		{"IPv6, of the world", world6, nodetable.Allow, 3, event.ForwardedFromStack},
		{"IPv6, forged", host6, nodetable.Pending, 1, event.PolicyPending},
	} {
		t.Run(fmt.Sprintf("%s, table %d", c.name, c.ingress), func(t *testing.T) {
			setPolicy(t, n.k, n.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: c.ingress})
			got, verdicts := n.send(t, c.src, 0, c.pieces)
			for s, count := range got {
				if s.Ingress != uint32(n.uplink.Attrs().Index) {
					t.Errorf("%d fragments came in by device %d, want %d", count, s.Ingress, n.uplink.Attrs().Index)
				}
			}
			if len(verdicts) != 1 || verdicts[c.reason] != c.pieces {
				t.Errorf("verdicts %v, want %v of %d", verdicts, c.reason, c.pieces)
			}
		})
	}
}

// TestKernelCopiedIPv6FragmentsKeepTheirMark: if the extension headers of the first fragment do not fit into the
// headroom of the others, the stack copies a reassembled IPv6 packet into new fragments. On Linux 6.18 these have no
// incoming device (ip6_copy_metadata does not copy skb_iif), as if the host had sent them; a newer kernel may keep it.
// All kernels keep the mark.
func TestKernelCopiedIPv6FragmentsKeepTheirMark(t *testing.T) {
	n := newFragmentNode(t)
	setPolicy(t, n.k, n.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
	got, _ := n.send(t, world6, 128, 4)
	for s, count := range got {
		t.Logf("%d fragments of device %d", count, s.Ingress)
		if s.Mark != forwardMark || s.Ingress != 0 && s.Ingress != uint32(n.uplink.Attrs().Index) {
			t.Errorf("%d fragments of device %d with mark %#x, want all with mark %#x", count, s.Ingress, s.Mark, forwardMark)
		}
	}
}

// TestKernelCopiedFragmentsUnderTheHostsAddressAreTheWorlds: such fragments belong to the world because of that mark,
// whatever their source address.
func TestKernelCopiedFragmentsUnderTheHostsAddressAreTheWorlds(t *testing.T) {
	n := newFragmentNode(t)
	setPolicy(t, n.k, n.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Pending})
	if _, verdicts := n.send(t, host6, 128, 1); verdicts[event.ForwardedFromStack] != 0 {
		t.Errorf("into a pod that only the host may enter: %v", verdicts)
	}
}
