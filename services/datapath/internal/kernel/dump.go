// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// MapNames lists the maps, sorted.
func (k *Kernel) MapNames() []string { return k.Pins.Names() }

// Dump hands the entries of a map to visit in words, in the order in which the
// kernel lists them, until visit returns an error. Elements of arrays that are
// all zero are left out; what each CPU counts is summed. Entries that come or go
// meanwhile may be missing.
//
// No lock is held while visit runs, so that it may be as slow as it likes.
func (k *Kernel) Dump(name string, visit func(key, value string) error) error {
	return k.dump(name, nil, visit)
}

// Dumper dumps maps with the names of nodes beside their numbers.
type Dumper struct {
	*Kernel
	NodeName func(number uint16) string // "": it is not known
}

// Dump is Kernel's.
func (d Dumper) Dump(name string, visit func(key, value string) error) error {
	return d.dump(name, d.NodeName, visit)
}

func (k *Kernel) dump(name string, nodeName func(uint16) string, visit func(key, value string) error) error {
	d, ok := dumpers[name]
	m, err := k.Pins.Borrow(name)
	if err != nil {
		return err
	}
	defer m.Close()
	switch name {
	case bpf.MapsMapSlEp:
		if visit, err = k.withoutEndpoint(visit); err != nil {
			return err
		}
	case bpf.MapsMapSlIpc4:
		d = entries(prefix4, ipcacheWords(nodeName))
	case bpf.MapsMapSlIpc6:
		d = entries(prefix6, ipcacheWords(nodeName))
	}
	if !ok {
		return fmt.Errorf("dump %s: no words for its entries", name)
	}
	return d(m, visit)
}

type dumper func(m *ebpf.Map, visit func(key, value string) error) error

// dumpers say how to read each map. A test compares them with the maps.
var dumpers = map[string]dumper{
	bpf.MapsMapSlEp:       array(number, endpointWords),
	bpf.MapsMapSlGen:      array(number, plain[uint64]),
	bpf.MapsMapSlIf:       entries(device, slotWords),
	bpf.MapsMapSlIp4:      entries(address4, slotWords),
	bpf.MapsMapSlIp6:      entries(address6, slotWords),
	bpf.MapsMapSlIpc4:     entries(prefix4, ipcacheWords(nil)),
	bpf.MapsMapSlIpc6:     entries(prefix6, ipcacheWords(nil)),
	bpf.MapsMapSlNode:     array(number, func(v *bpf.MapsSlNode) string { return nodemap.Describe(v) }),
	bpf.MapsMapSlNodeAddr: entries(nodemap.DescribeAddr, func(v *uint32) string { return fmt.Sprintf("node %d", *v) }),
	bpf.MapsMapSlTable:    array(number, tableWordsOf),
	bpf.MapsMapSlId:       array(identityAt, identityWords),
	bpf.MapsMapSlPeer:     entries(peerKey, func(v *uint32) string { return fmt.Sprintf("class %d", *v) }),
	bpf.MapsMapSlCidr4:    entries(cidr4, cidrWords),
	bpf.MapsMapSlCidr6:    entries(cidr6, cidrWords),
	bpf.MapsMapSlClass:    array(number, func(v *uint32) string { return fmt.Sprintf("node %d", *v) }),
	bpf.MapsMapSlPorts:    array(number, nodeWords),
	bpf.MapsMapSlRule:     array(number, ruleWords),
	bpf.MapsMapSlClassKey: array(number, func(v *bpf.MapsSlClassKey) string { return hex.EncodeToString(v.Key[:]) }),
	bpf.MapsMapSlTableKey: array(number, func(v *bpf.MapsSlTableKey) string { return hex.EncodeToString(v.Hash[:]) }),
	bpf.MapsMapSlCt4:      batched(connectionKey4, connectionWords),
	bpf.MapsMapSlCt6:      batched(connectionKey6, connectionWords),
	bpf.MapsMapSlRevoked4: entries(connectionKey4, revokedWords),
	bpf.MapsMapSlRevoked6: entries(connectionKey6, revokedWords),
	bpf.MapsMapSlBudget:   array(budgetKey, func(v *bpf.MapsSlBudget) string { return budgetWords(v) }),
	bpf.MapsMapSlBound: array(boundName, func(v *bpf.MapsSlBound) string {
		return fmt.Sprintf("guarantee %d common %d of which used %d, refused at %d s",
			v.Guarantee, v.Common, v.Used, v.RefusedS)
	}),
	bpf.MapsMapSlHeld: array(number, func(v *bpf.MapsSlHeld) string { return fmt.Sprint(v.N) }),
	bpf.MapsMapSlRefused: array(number, func(v *bpf.MapsSlRefused) string {
		return fmt.Sprint(v.N)
	}),
	bpf.MapsMapSlPgen:    array(number, plain[uint64]),
	bpf.MapsMapSlFe4:     batched(servicemap.DescribeKey4, servicemap.DescribeFronts),
	bpf.MapsMapSlFe6:     batched(servicemap.DescribeKey6, servicemap.DescribeFronts),
	bpf.MapsMapSlFront:   array(number, servicemap.DescribeFront),
	bpf.MapsMapSlMember:  array(number, servicemap.DescribeMember),
	bpf.MapsMapSlBe4:     array(number, servicemap.DescribeBackend4),
	bpf.MapsMapSlBe6:     array(number, servicemap.DescribeBackend6),
	bpf.MapsMapSlNs:      entries(cookie, namespaceWords),
	bpf.MapsMapSlAff4:    entries(affinityKey4, affinityWords),
	bpf.MapsMapSlAff6:    entries(affinityKey6, affinityWords),
	bpf.MapsMapSlPodAff4: entries(affinityKey4, affinityWords),
	bpf.MapsMapSlPodAff6: entries(affinityKey6, affinityWords),
	bpf.MapsMapSlSk: func(_ *ebpf.Map, visit func(key, value string) error) error {
		return visit("sockets", "what each socket was translated to is in its own storage, which cannot be listed by a key")
	},
	bpf.MapsMapSlSrc4: entries(servicemap.DescribeSource4, plain[uint32]),
	bpf.MapsMapSlSrc6: entries(servicemap.DescribeSource6, plain[uint32]),
	bpf.MapsMapSlXl4:  translations(translation.Of4),
	bpf.MapsMapSlXl6:  translations(translation.Of6),

	bpf.MapsMapSlPodXl4:   translations(translation.Of4),
	bpf.MapsMapSlPodXl6:   translations(translation.Of6),
	bpf.MapsMapSlAnswers4: translations(translation.Of4),
	bpf.MapsMapSlAnswers6: translations(translation.Of6),
	bpf.MapsMapSlOwn:      array(number, endpointmap.DescribeOwn),
	bpf.MapsMapSlShare: entries(translation.DescribeShareKey, func(v *bpf.MapsSlShare) string {
		return fmt.Sprintf("ports %d, senders with shares %d", v.Ports, v.Senders)
	}),
	bpf.MapsMapSlRing4: array(number, func(v *bpf.MapsSlRing4) string {
		k := v.Key
		return ringWords(pin.Addr4(k.Lo), k.Plo, pin.Addr4(k.Hi), k.Phi, k.Proto, v.Seen, v.Skips)
	}),
	bpf.MapsMapSlRing6: array(number, func(v *bpf.MapsSlRing6) string {
		k := v.Key
		return ringWords(netip.AddrFrom16(k.Lo), k.Plo, netip.AddrFrom16(k.Hi), k.Phi, k.Proto, v.Seen, v.Skips)
	}),
	bpf.MapsMapSlCount: array(number, func(v *bpf.MapsSlCounters) string {
		return fmt.Sprint(v.N)
	}),
	bpf.MapsMapSlFrag:    entries(fragmentKey, fragmentWords),
	bpf.MapsMapSlPodFrag: entries(fragmentKey, fragmentWords),
	bpf.MapsMapSlCtStats: perCPU(statName, add[uint64], plain[uint64]),
	bpf.MapsMapSlMetrics: perCPU(cellName, func(sum *bpf.MapsSlCounter, v bpf.MapsSlCounter) {
		sum.Packets += v.Packets
		sum.Bytes += v.Bytes
	}, func(v *bpf.MapsSlCounter) string { return fmt.Sprintf("packets %d bytes %d", v.Packets, v.Bytes) }),
	// the windows of the CPUs have nothing to do with each other
	bpf.MapsMapSlLimits: perCPU(limitName, func(sum *bpf.MapsSlLimit, v bpf.MapsSlLimit) {
		sum.LostTotal += v.LostTotal
		sum.Lost += v.Lost
	}, func(v *bpf.MapsSlLimit) string {
		return fmt.Sprintf("lost %d, of which untold %d", v.LostTotal, v.Lost)
	}),
	bpf.MapsMapSlRate: perCPU(rateName, func(sum *bpf.MapsSlRate, v bpf.MapsSlRate) {
		sum.Refused += v.Refused
	}, func(v *bpf.MapsSlRate) string { return fmt.Sprintf("refused %d", v.Refused) }),
	bpf.MapsMapSlEpLimits: array(number, func(v *bpf.MapsSlEpLimit) string {
		var words []string
		for kind, sent := range v.Sent {
			if sent != 0 {
				words = append(words, fmt.Sprintf("kind %d: %d in second %d", kind, uint32(sent), sent>>32))
			}
		}
		return strings.Join(words, ", ")
	}),
	bpf.MapsMapSlRun: func(_ *ebpf.Map, visit func(key, value string) error) error {
		return visit("cells", "memory of running programs; what an earlier packet left there means nothing")
	},
	bpf.MapsMapSlEvents: func(m *ebpf.Map, visit func(key, value string) error) error {
		return visit("ring", fmt.Sprintf("%d bytes; its one reader is the datapath, which tells by Observe what it reads", m.MaxEntries()))
	},
}

func cookie(c *uint64) string { return fmt.Sprintf("namespace %d", *c) }

func namespaceWords(v *bpf.MapsSlNs) string {
	if v.Flags != 0 {
		return fmt.Sprintf("slot %d flags %#x", v.Slot, v.Flags)
	}
	return fmt.Sprintf("slot %d", v.Slot)
}

func affinityWords(v *uint64) string {
	return fmt.Sprintf("backend %d generation %d last used at %d s", *v&0xffffff, uint8(*v>>24), *v>>32)
}

func budgetKey(at *uint32) string {
	family := []string{"IPv4", "IPv6"}[*at&1]
	if *at>>1 == conntrack.Outside {
		return "outside " + family
	}
	return fmt.Sprintf("%d %s", *at>>1, family)
}

func affinityKey4(k *bpf.MapsSlAffKey4) string {
	return fmt.Sprintf("%v group %d", pin.Addr4(k.Client), k.Group)
}

func affinityKey6(k *bpf.MapsSlAffKey6) string {
	return fmt.Sprintf("%v group %d", netip.AddrFrom16(k.Client), k.Group)
}

func fragmentWords(v *uint32) string { return fmt.Sprintf("ports %d %d", *v>>16, *v&0xffff) }

func budgetWords(v *bpf.MapsSlBudget) string {
	words := fmt.Sprintf("used %d limit %d", uint32(v.Begun), uint32(v.Limit))
	if ended := int32(v.Limit >> 32); ended != 0 {
		words += fmt.Sprintf(" ended %d", ended)
	}
	if since := v.Begun >> 32; since != 0 {
		words += fmt.Sprintf(" used up at %d s", since)
	}
	return words
}

// entries reads a hash or a trie one by one.
func entries[K, V any](key func(*K) string, value func(*V) string) dumper {
	return func(m *ebpf.Map, visit func(key, value string) error) error {
		var k K
		var v V
		it := m.Iterate()
		for it.Next(&k, &v) {
			if err := visit(key(&k), value(&v)); err != nil {
				return err
			}
		}
		return it.Err()
	}
}

// batched reads a large map by batches.
func batched[K, V any](key func(*K) string, value func(*V) string) dumper {
	return func(m *ebpf.Map, visit func(key, value string) error) error {
		size := min(pin.BatchSize, int(m.MaxEntries()))
		keys, values := make([]K, size), make([]V, size)
		var cursor ebpf.MapBatchCursor
		for {
			n, err := m.BatchLookup(&cursor, keys, values, nil)
			end := errors.Is(err, ebpf.ErrKeyNotExist)
			if err != nil && !end {
				return err
			}
			for i := range n {
				if err := visit(key(&keys[i]), value(&values[i])); err != nil {
					return err
				}
			}
			if end {
				return nil
			}
		}
	}
}

// translations reads a map of translations by batches.
func translations[K any](read func(*K, *bpf.MapsSlXl) translation.Translation) dumper {
	return func(m *ebpf.Map, visit func(key, value string) error) error {
		return pin.EachEntry(m, pin.Unguarded, func(keys []K, values []bpf.MapsSlXl) error {
			for i := range keys {
				t := read(&keys[i], &values[i])
				if err := visit(translation.DescribeKey(t), translation.DescribeValue(t)); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// array is batched without the elements that are all zero.
func array[V comparable](key func(*uint32) string, value func(*V) string) dumper {
	return func(m *ebpf.Map, visit func(key, value string) error) error {
		var zero V
		words := func(v *V) string {
			if *v == zero {
				return ""
			}
			return value(v)
		}
		return batched(key, words)(m, func(key, value string) error {
			if value == "" {
				return nil
			}
			return visit(key, value)
		})
	}
}

// perCPU sums what the CPUs have.
func perCPU[V comparable](key func(*uint32) string, sum func(*V, V), value func(*V) string) dumper {
	return func(m *ebpf.Map, visit func(key, value string) error) error {
		var zero V
		for i := range m.MaxEntries() {
			var vs []V
			if err := m.Lookup(i, &vs); err != nil {
				return err
			}
			var total V
			for _, v := range vs {
				sum(&total, v)
			}
			if total == zero {
				continue
			}
			if err := visit(key(&i), value(&total)); err != nil {
				return err
			}
		}
		return nil
	}
}

func add[N uint32 | uint64](sum *N, v N)   { *sum += v }
func plain[N uint32 | uint64](v *N) string { return fmt.Sprint(*v) }
func number(i *uint32) string              { return fmt.Sprint(*i) }
func boundName(i *uint32) string           { return bound.Bound(*i).String() }
func device(i *uint32) string              { return fmt.Sprintf("device %d", *i) }
func slotWords(s *uint32) string           { return fmt.Sprintf("slot %d", *s) }
func address4(a *[4]byte) string           { return netip.AddrFrom4(*a).String() }
func address6(a *bpf.MapsSlAddr6) string   { return netip.AddrFrom16(a.Addr).String() }
func prefix4(p *bpf.MapsSlPrefix4) string  { return bitsOf(netip.AddrFrom4(p.Addr), p.Bits) }
func prefix6(p *bpf.MapsSlPrefix6) string  { return bitsOf(netip.AddrFrom16(p.Addr), p.Bits) }
func peerKey(p *bpf.MapsSlPeerKey) string {
	return fmt.Sprintf("set %d identity class %d", p.PeerSet, p.NodeClass)
}

// limitName names a limit: ends of connections have no reason of their own, and
// are limited under 0.
func rateName(i *uint32) string {
	names := []string{"answers-to-pods", "answers-outside", "errors-too-big"}
	if int(*i) < len(names) {
		return names[*i]
	}
	return number(i)
}

func limitName(i *uint32) string {
	if *i == 0 {
		return "connection-closed"
	}
	return event.Reason(*i).String()
}

func cellName(i *uint32) string {
	return fmt.Sprintf("%s %s", event.Reason(*i>>1), event.Direction(*i&1+1))
}

// ringWords puts a position of a ring into words.
func ringWords(lo netip.Addr, plo uint16, hi netip.Addr, phi uint16, protocol uint8, seen, skips uint32) string {
	return fmt.Sprintf("protocol %d between %v and %v, seen at %d s, passed over %d times",
		protocol, netip.AddrPortFrom(lo, plo), netip.AddrPortFrom(hi, phi), seen, skips)
}

func bitsOf(a netip.Addr, bits uint32) string { return fmt.Sprintf("%v/%d", a, bits) }

// cidrKey names a prefix of a set. The set counts with the prefix, and travels in
// network byte order.
func cidrKey(set uint32, a netip.Addr, bits uint32) string {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], set)
	return fmt.Sprintf("set %d %s", binary.BigEndian.Uint32(b[:]), bitsOf(a, bits-32))
}

func cidr4(b *bpf.MapsSlCidrKey4) string { return cidrKey(b.Set, netip.AddrFrom4(b.Addr), b.Bits) }

func cidr6(b *bpf.MapsSlCidrKey6) string { return cidrKey(b.Set, netip.AddrFrom16(b.Addr), b.Bits) }

func cidrWords(v *bpf.MapsSlCidr) string {
	return fmt.Sprintf("cluster class %d identity class %d outside class %d", v.Class[0], v.Class[1], v.Class[2])
}

// ipcacheWords name the node of an entry if its name is known.
func ipcacheWords(nodeName func(uint16) string) func(*bpf.MapsSlIpcache) string {
	return func(v *bpf.MapsSlIpcache) string {
		s := fmt.Sprintf("identity %d", v.Identity)
		if v.Node != 0 {
			s += fmt.Sprintf(" node %d", v.Node)
			if nodeName != nil {
				if name := nodeName(v.Node); name != "" {
					s += " " + name
				}
			}
		}
		if ipmap.Flags(v.Flags)&ipmap.PodRange != 0 {
			s += " pod-range"
		}
		if ipmap.Flags(v.Flags)&ipmap.Outside != 0 {
			s += " outside"
		}
		if ipmap.Flags(v.Flags)&ipmap.ByStack != 0 {
			s += " by-stack"
		}
		if ipmap.Flags(v.Flags)&ipmap.OfDevice != 0 {
			s += " of-device"
		}
		return s
	}
}

// withoutEndpoint marks the records of sl_ep that no device leads to: a slot that was
// given back keeps the record of the endpoint that it had, and denies everything.
func (k *Kernel) withoutEndpoint(visit func(key, value string) error) (func(key, value string) error, error) {
	devices, err := k.Pins.Borrow(bpf.MapsMapSlIf)
	if err != nil {
		return nil, err
	}
	defer devices.Close()
	host := uint32(0) // of the node's own processes, without a device
	used := map[string]bool{number(&host): true}
	if err := entries(device, number)(devices, func(_, slot string) error { used[slot] = true; return nil }); err != nil {
		return nil, err
	}
	return func(key, value string) error {
		if !used[key] {
			value = "deleted: " + value
		}
		return visit(key, value)
	}, nil
}

// endpointWords are an endpoint's record.
func endpointWords(r *bpf.MapsSlEndpoint) string {
	e := endpointmap.EndpointOf(0, r)
	s := fmt.Sprintf("egress table %d ingress table %d epoch %d device %d identity %d",
		e.Policy.Egress, e.Policy.Ingress, e.Policy.Epoch, e.Ifindex, e.Identity)
	for _, a := range e.Addrs() {
		s += " " + a.String()
	}
	if e.Ifindex != 0 {
		s += fmt.Sprintf(" mac %v host mac %v mtu %d", net.HardwareAddr(e.MAC[:]), net.HardwareAddr(e.HostMAC[:]), e.MTU)
		s += map[endpointmap.Deliver]string{endpointmap.DeliverPeer: " deliver peer", endpointmap.DeliverRedirect: " deliver redirect"}[e.Deliver]
	}
	if e.Audit {
		s += " audit"
	}
	return s
}

func nameOf(names []string, i uint32) string {
	if int(i) < len(names) {
		return names[i]
	}
	return fmt.Sprint(i)
}

// identityAt is the identity at an index of sl_id.
func identityAt(i *uint32) string { return fmt.Sprintf("identity %d", policymap.IdentityAt(int(*i))) }

func identityWords(v *uint32) string {
	s := fmt.Sprintf("identity class %d kind %s scope %s", *v&0xffff, identity.Kind(*v>>16&7), identity.PeerScope(*v>>24&3))
	if *v&(1<<31) == 0 {
		s += " unknown"
	}
	return s
}

func tableWordsOf(t *bpf.MapsSlTable) string {
	s := fmt.Sprintf("peer set %d address set %d classes %d from %d rules %d from %d", t.PeerSet, t.CidrSet, t.N_class, t.ClassBase, t.N_rule, t.RuleBase)
	for i, flag := range []string{"default-allow", "host-allow", "addresses"} {
		if t.Flags&(1<<i) != 0 {
			s += " " + flag
		}
	}
	s += " default classes"
	for i, c := range t.DefClass {
		s += fmt.Sprintf(" %s=%d", identity.Kind(i), c)
	}
	s += " address classes"
	for i, c := range t.AddrDef {
		s += fmt.Sprintf(" %s=%d", identity.PeerScope(i), c)
	}
	return s
}

// nodeWords are the intervals, each with its end as protocol/port.
func nodeWords(n *bpf.MapsSlPortNode) string {
	const child, noAdmin, noRest = 1 << 31, 0x7fff, 0xffff
	var parts []string
	for i, hi := range n.Hi {
		if i > 0 && hi == n.Hi[i-1] {
			break // the others repeat the last
		}
		s := fmt.Sprintf("to %d/%d", hi>>16, hi&0xffff)
		switch v := n.Val[i]; {
		case v&child != 0:
			s += fmt.Sprintf(" node %d", v&^child)
		default:
			if a := v >> 16; a != noAdmin {
				s += fmt.Sprintf(" admin rule %d", a)
			}
			if r := v & 0xffff; r != noRest {
				s += fmt.Sprintf(" rule %d", r)
			}
			if v == noAdmin<<16|noRest {
				s += " no rule"
			}
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, ", ")
}

func ruleWords(r *bpf.MapsSlRule) string {
	s := fmt.Sprintf("%s tier %s",
		nameOf([]string{"deny", "redirect", "allow", "pass"}, uint32(r.Action)),
		nameOf([]string{"admin", "normal", "isolation", "baseline"}, uint32(r.Tier)))
	if r.Redirect != 0 {
		s += fmt.Sprintf(" proxy %d", r.Redirect)
	}
	return s
}

func connectionKey4(k *bpf.MapsSlCtKey4) string {
	return connectionKey(conntrack.Tuple4(k, uint32(conntrack.OriginLow)))
}

func connectionKey6(k *bpf.MapsSlCtKey6) string {
	return connectionKey(conntrack.Tuple6(k, uint32(conntrack.OriginLow)))
}

func connectionKey(t conntrack.Tuple) string {
	words := fmt.Sprintf("protocol %d %v %v", t.Protocol, t.Initiator, t.Responder)
	if t.Transit {
		words += " in transit"
	}
	if t.Asked {
		words += " asked"
	}
	return words
}

func revokedWords(v *bpf.MapsSlRevoked) string {
	words := "begun by the second"
	switch f := conntrack.Flags(v.Flags); {
	case f&conntrack.Unoriented != 0:
		words = "begun by either"
	case f&conntrack.OriginLow != 0:
		words = "begun by the first"
	}
	return fmt.Sprintf("%s, last denied at %d s", words, v.LastS)
}

func connectionWords(v *bpf.MapsSlCt) string {
	c := conntrack.Of(conntrack.Tuple{}, v)
	began := "second"
	if c.Flags&conntrack.OriginLow != 0 {
		began = "first"
	}
	s := fmt.Sprintf("begun by the %s %s, idle %d s,", began, strings.Join(c.Flags.Words(), " "), int32(conntrack.MonotonicSeconds()-c.LastSeen))
	for _, e := range []struct {
		name string
		conntrack.End
		rule uint16
	}{{"initiator", c.From, c.EgressRule}, {"responder", c.To, c.IngressRule}} {
		s += fmt.Sprintf(" %s identity %d", e.name, e.Identity)
		if e.Slot != endpointmap.NoID {
			s += fmt.Sprintf(" slot %d epoch %d rule %d", e.Slot, e.Epoch, e.rule)
		}
		if e.AddressEpoch != 0 {
			s += fmt.Sprintf(" address epoch %d", e.AddressEpoch)
		}
	}
	if v.NatAddress != 0 {
		s += fmt.Sprintf(" source port %d at place %d of sl_own", v.NatPort, v.NatAddress-1)
	}
	return s
}

func fragmentKey(f *bpf.MapsSlFragment) string {
	src, dst := netip.AddrFrom16(f.Src), netip.AddrFrom16(f.Dst)
	if f.Family == 4 {
		src, dst = netip.AddrFrom4([4]byte(f.Src[:4])), netip.AddrFrom4([4]byte(f.Dst[:4]))
	}
	s := fmt.Sprintf("protocol %d %v %v id %d", f.Proto, src, dst, f.Id)
	if f.Slot != endpointmap.NoID {
		s += fmt.Sprintf(" slot %d", f.Slot)
	}
	return s
}

func statName(i *uint32) string {
	names := []string{"created", "deleted", "revoked", "picked-up", "reevaluated", "related", "unremembered"}
	if *i == conntrack.StatExpired {
		return "expired"
	}
	return nameOf(names, *i)
}
