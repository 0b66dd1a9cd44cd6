// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// portHooks are the hooks that tunnel packets pass on their way to and from the tunnel device.
var portHooks = map[nftables.ChainHook]string{
	*nftables.ChainHookPrerouting: "prerouting", *nftables.ChainHookInput: "input", *nftables.ChainHookOutput: "output",
	*nftables.ChainHookPostrouting: "postrouting", hookInetIngress: "ingress",
}

// hookInetIngress is NF_INET_INGRESS of linux/netfilter.h.
const hookInetIngress nftables.ChainHook = 5

// PortRules lists the firewall rules of others that match the given UDP destination port, each with its table and
// chain. Rules without a condition on this port are not listed. It ignores the other conditions of a rule, and tables
// for IPv6 alone, because only IPv4 tunnel packets bypass the tunnel device. It cannot read rules of iptables-legacy.
func (t *Table) PortRules(port uint16) (found []string, err error) {
	hook := func(ch *nftables.Chain) string {
		switch ch.Table.Family {
		case nftables.TableFamilyIPv4, nftables.TableFamilyINet:
			return portHooks[*ch.Hooknum]
		case nftables.TableFamilyNetdev:
			if *ch.Hooknum == *nftables.ChainHookIngress {
				return "ingress"
			}
		}
		return ""
	}
	more := false
	err = t.conn(func(c *nftables.Conn) error {
		found, more, err = t.searchRules(c, hook, func(ch *nftables.Chain, r *nftables.Rule, hook string) (string, error) {
			meets, err := meetsPort(c, ch.Table, r.Exprs, port)
			if err != nil || !meets {
				return "", err
			}
			return fmt.Sprintf("rule %d of chain %s of table %s %s (%s)",
				r.Handle, ch.Name, familyName(ch.Table.Family), ch.Table.Name, hook), nil
		})
		return err
	})
	if more {
		found = append(found, fmt.Sprintf("more than %d firewall chains: not all were searched", mostChains))
	}
	return found, err
}

// portRegister is what a register of a rule contains.
type portRegister uint8

const (
	holdsOther    portRegister = iota
	holdsProtocol              // of the transport header
	holdsPorts                 // source and destination port
	holdsPort                  // destination port
)

// meetsPort reports whether a rule has conditions about the UDP destination port, and the port meets them.
func meetsPort(c *nftables.Conn, table *nftables.Table, exprs []expr.Any, port uint16) (bool, error) {
	want := binary.BigEndian.AppendUint16(nil, port)
	registers := map[uint32]portRegister{}
	asks, loaded := false, false
	for _, e := range exprs {
		var meets bool
		switch e := e.(type) {
		case *expr.Meta:
			if !e.SourceRegister {
				registers[e.Register] = holdsOther
				if e.Key == expr.MetaKeyL4PROTO {
					registers[e.Register] = holdsProtocol
				}
			}
			continue
		case *expr.Payload:
			if e.OperationType == expr.PayloadLoad {
				registers[e.DestRegister] = payloadRegister(e)
				loaded = loaded || registers[e.DestRegister] >= holdsPorts
			}
			continue
		case *expr.Bitwise:
			registers[e.DestRegister] = holdsOther
			continue
		case *expr.Cmp:
			switch registers[e.Register] {
			case holdsProtocol:
				if len(e.Data) > 0 && !compares(e.Op, []byte{unix.IPPROTO_UDP}, e.Data[:1]) {
					return false, nil
				}
				continue
			case holdsPorts:
				meets = len(e.Data) != 4 || e.Op != expr.CmpOpEq || bytes.Equal(e.Data[2:], want)
			case holdsPort:
				meets = compares(e.Op, want, e.Data)
			default:
				continue
			}
		case *expr.Range:
			if registers[e.Register] != holdsPort {
				continue
			}
			within := bytes.Compare(want, e.FromData) >= 0 && bytes.Compare(want, e.ToData) <= 0
			meets = within == (e.Op == expr.CmpOpEq)
		case *expr.Lookup:
			var err error
			if meets, err = meetsSet(c, table, e, registers[e.SourceRegister], loaded, want); err != nil {
				return false, err
			}
			if registers[e.SourceRegister] == holdsProtocol {
				if !meets {
					return false, nil
				}
				continue
			}
			if registers[e.SourceRegister] == holdsOther && !meets {
				continue
			}
		case *expr.Match:
			var about bool
			if about, meets = matchPort(e, port); !about {
				continue
			}
		default:
			continue
		}
		if !meets {
			return false, nil
		}
		asks = true
	}
	return asks, nil
}

// payloadRegister returns what a register contains after a part of the packet is loaded.
func payloadRegister(e *expr.Payload) portRegister {
	const atProtocol, atPort = 9, 2 // in the IPv4 header, and in the transport header
	switch {
	case e.Base == expr.PayloadBaseNetworkHeader && e.Offset == atProtocol && e.Len == 1:
		return holdsProtocol
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset == atPort && e.Len == 2:
		return holdsPort
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset == 0 && e.Len == 4:
		return holdsPorts
	}
	return holdsOther
}

// compares compares numbers in network order, as a rule does.
func compares(op expr.CmpOp, have, with []byte) bool {
	order := bytes.Compare(have, with)
	switch op {
	case expr.CmpOpEq:
		return order == 0
	case expr.CmpOpNeq:
		return order != 0
	case expr.CmpOpLt:
		return order < 0
	case expr.CmpOpLte:
		return order <= 0
	case expr.CmpOpGt:
		return order > 0
	case expr.CmpOpGte:
		return order >= 0
	}
	return true
}

// meetsSet reports whether a set or map contains the value of a register: the port, or the protocol number of UDP. If
// the elements combine several values, the others are unknown here; it then returns loaded, which reports whether the
// rule has loaded the destination port.
func meetsSet(c *nftables.Conn, table *nftables.Table, e *expr.Lookup, register portRegister, loaded bool,
	port []byte,
) (bool, error) {
	set, err := c.GetSetByName(table, e.SetName)
	if err != nil {
		return false, ignoreAbsent(err, e.SetName, table)
	}
	if set.Concatenation || register == holdsPorts {
		return loaded, nil
	}
	value := port
	switch register {
	case holdsProtocol:
		value = []byte{unix.IPPROTO_UDP}
	case holdsOther:
		return false, nil
	}
	elements, err := c.GetSetElements(set)
	if err != nil {
		return false, ignoreAbsent(err, e.SetName, table)
	}
	inside, last := false, []byte(nil) // the last bound of an interval that is not above the value
	for _, el := range elements {
		if len(el.Key) < len(value) {
			continue
		}
		key := el.Key[:len(value)]
		switch {
		case !set.Interval:
			inside = inside || bytes.Equal(key, value)
		case bytes.Compare(key, value) > 0:
		case bytes.Compare(key, last) > 0 || bytes.Equal(key, last) && !el.IntervalEnd:
			inside, last = !el.IntervalEnd, key // the end is the first value beyond the interval
		}
	}
	return inside != e.Invert, nil
}

// ignoreAbsent returns nil if a set was deleted meanwhile.
func ignoreAbsent(err error, set string, table *nftables.Table) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("read set %s of table %s: %w", set, table.Name, err)
}

// matchPort evaluates the matches of iptables about destination ports that iptables-nft keeps in rules.
func matchPort(e *expr.Match, port uint16) (about, meets bool) {
	switch info := e.Info.(type) {
	case *xt.Udp:
		about = info.DstPorts != [2]uint16{0, 0xffff}
		within := port >= info.DstPorts[0] && port <= info.DstPorts[1]
		return about, within == (info.InvFlags&xt.UdpInvDestPorts == 0)
	case *xt.Tcp:
		return true, false
	case *xt.Unknown:
		if e.Name == "multiport" {
			return multiport(*info, port)
		}
	}
	return false, false
}

// multiport evaluates struct xt_multiport_v1 of linux/netfilter/xt_multiport.h.
func multiport(info []byte, port uint16) (about, meets bool) {
	const source, most, atPorts, atRange, atInvert = 0, 15, 2, 32, 47
	if len(info) <= atInvert || info[0] == source {
		return false, false
	}
	ports := make([]uint16, min(int(info[1]), most))
	for i := range ports {
		ports[i] = binary.NativeEndian.Uint16(info[atPorts+2*i:])
	}
	for i := 0; i < len(ports); i++ {
		last := ports[i]
		first := last
		if info[atRange+i] != 0 && i+1 < len(ports) {
			i++
			last = ports[i]
		}
		meets = meets || port >= first && port <= last
	}
	return true, meets == (info[atInvert] == 0)
}
