// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// markHooks are the hooks that packets pass between two programs of Sluice.
var markHooks = map[nftables.ChainHook]string{
	*nftables.ChainHookPrerouting: "prerouting", *nftables.ChainHookForward: "forward", *nftables.ChainHookPostrouting: "postrouting",
}

// mostChains is the maximum number of chains that a search reads. It skips chains of type nat: they only process the
// first packet of a connection, and kube-proxy has thousands.
const mostChains = 512

// MarkRules lists the firewall rules of others that may change bits of the packet mark other than free: one line each,
// with table and chain. Conditions of rules are ignored. Rules of iptables-legacy cannot be read this way.
func (t *Table) MarkRules(free uint32) (found []string, err error) {
	hook := func(ch *nftables.Chain) string {
		if !routed(ch.Table.Family) {
			return ""
		}
		return markHooks[*ch.Hooknum]
	}
	more := false
	err = t.conn(func(c *nftables.Conn) error {
		found, more, err = t.searchRules(c, hook, func(ch *nftables.Chain, r *nftables.Rule, hook string) (string, error) {
			how, changed := markChange(r.Exprs)
			if changed&^free == 0 {
				return "", nil
			}
			return fmt.Sprintf("rule %d of chain %s of table %s %s (%s) %s: it changes bits %#x of the packet mark, "+
				"which tell the programs which packets they have evaluated",
				r.Handle, ch.Name, familyName(ch.Table.Family), ch.Table.Name, hook, how, changed&^free), nil
		})
		return err
	})
	if more {
		found = append(found,
			fmt.Sprintf("more than %d firewall chains: not all were searched for rules that change the packet mark", mostChains))
	}
	return found, err
}

func routed(f nftables.TableFamily) bool {
	return f == nftables.TableFamilyIPv4 || f == nftables.TableFamilyIPv6 || f == nftables.TableFamilyINet
}

type chainKey struct {
	family      nftables.TableFamily
	table, name string
}

func nameOf(t *nftables.Table, chain string) chainKey { return chainKey{t.Family, t.Name, chain} }

// judge describes what is wrong with a rule that packets reach from a hook; "": nothing.
type judge func(ch *nftables.Chain, r *nftables.Rule, hook string) (string, error)

type ruleSearch struct {
	conn   *nftables.Conn
	chains map[chainKey]*nftables.Chain
	seen   map[chainKey]bool
	judge  judge
	found  []string
}

// searchRules searches the chains of others that hook returns a name for, and all chains that these jump to. more
// reports that there are chains that it did not search.
func (t *Table) searchRules(c *nftables.Conn, hook func(*nftables.Chain) string, judge judge) (found []string,
	more bool, err error,
) {
	chains, err := c.ListChains()
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, false, fmt.Errorf("list firewall chains: %w", err)
	}
	s := &ruleSearch{conn: c, chains: map[chainKey]*nftables.Chain{}, seen: map[chainKey]bool{}, judge: judge}
	for _, ch := range chains {
		s.chains[nameOf(ch.Table, ch.Name)] = ch
	}
	for _, ch := range chains {
		if ch.Hooknum == nil || ch.Type == nftables.ChainTypeNAT || ch.Table.Name == t.name {
			continue
		}
		if name := hook(ch); name != "" {
			if err := s.search(ch, name); err != nil {
				return nil, false, err
			}
		}
	}
	return s.found, len(s.seen) >= mostChains, nil
}

// search searches a chain and all chains that it jumps to.
func (s *ruleSearch) search(ch *nftables.Chain, hook string) error {
	name := nameOf(ch.Table, ch.Name)
	if s.seen[name] || len(s.seen) >= mostChains {
		return nil
	}
	s.seen[name] = true
	rules, err := s.conn.GetRules(ch.Table, ch)
	if errors.Is(err, unix.ENOENT) {
		return nil // deleted meanwhile
	}
	if err != nil {
		return fmt.Errorf("list the rules of chain %s of table %s: %w", ch.Name, ch.Table.Name, err)
	}
	for _, r := range rules {
		what, err := s.judge(ch, r, hook)
		if err != nil {
			return err
		}
		if what != "" {
			s.found = append(s.found, what)
		}
		for _, e := range r.Exprs {
			v, ok := e.(*expr.Verdict)
			if !ok || v.Kind != expr.VerdictJump && v.Kind != expr.VerdictGoto {
				continue
			}
			if next := s.chains[nameOf(ch.Table, v.Chain)]; next != nil {
				if err := s.search(next, hook); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func familyName(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	case nftables.TableFamilyNetdev:
		return "netdev"
	}
	return "inet"
}

// markChange returns which bits of the packet mark a rule may change, and how.
func markChange(exprs []expr.Any) (how string, changed uint32) {
	// content of a register: the mark with some bits changed, or anything else
	type content struct {
		mark    bool
		changed uint32
		how     string
	}
	registers := map[uint32]content{}
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Meta:
			switch {
			case e.SourceRegister && e.Key == expr.MetaKeyMARK:
				from := registers[e.Register]
				from.how = cmp.Or(from.how, "sets the mark")
				if !from.mark {
					from.changed = ^uint32(0)
				}
				how, changed = from.how, changed|from.changed
			case !e.SourceRegister:
				registers[e.Register] = content{mark: e.Key == expr.MetaKeyMARK}
			}
		case *expr.Ct:
			if !e.SourceRegister {
				registers[e.Register] = content{how: "restores a connection's mark"}
			}
		case *expr.Immediate:
			registers[e.Register] = content{}
		case *expr.Bitwise:
			from := registers[e.SourceRegister]
			if len(e.Mask) == 4 && len(e.Xor) == 4 {
				from.changed |= ^binary.NativeEndian.Uint32(e.Mask) | binary.NativeEndian.Uint32(e.Xor)
			} else {
				from.changed = ^uint32(0)
			}
			registers[e.DestRegister] = from
		case *expr.Target:
			if h, c := targetChange(e); c != 0 {
				how, changed = h, changed|c
			}
		}
	}
	return how, changed
}

// Modes of CONNMARK in linux/netfilter/xt_connmark.h.
const connmarkRestore = 2

// targetChange evaluates the iptables targets that iptables-nft keeps in rules.
func targetChange(e *expr.Target) (string, uint32) {
	var info []byte
	if u, ok := e.Info.(*xt.Unknown); ok {
		info = *u
	}
	word := func(i int) uint32 {
		if len(info) < 4*i+4 {
			return ^uint32(0)
		}
		return binary.NativeEndian.Uint32(info[4*i:])
	}
	switch e.Name {
	case "MARK": // mark, mask: (old & ~mask) ^ mark
		return "sets the mark", word(0) | word(1)
	case "CONNMARK": // ctmark, ctmask, nfmask, mode
		if len(info) > 12 && info[12] != connmarkRestore {
			return "", 0
		}
		return "restores a connection's mark", word(2)
	}
	return "", 0
}
