// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package publish

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/policy"
)

// Policies implements policy.Kernel.
type Policies struct {
	Kernel *kernel.Kernel
}

// DefineTable implements policy.Kernel.
func (p Policies) DefineTable(c policy.Content) (policy.Table, error) {
	t, err := p.Kernel.DefineTable(kernelContent(c))
	return policy.Table(t), noRoom(err)
}

func kernelContent(c policy.Content) kernel.TableContent {
	out := kernel.TableContent{
		Hash: c.Hash, DefaultAllow: c.DefaultAllow, HostAllow: c.HostAllow, HasAddresses: c.HasAddresses,
		DefaultClasses: c.DefaultClasses, AddressClasses: c.AddressClasses,
		Rules: make([]kernel.TableRule, len(c.Rules)), Classes: c.Classes, Nodes: kernelNodes(c.Nodes),
		Peers: make(map[kernel.NodeClass]uint16, len(c.Peers)), Blocks: make([]kernel.Block, 0, len(c.Blocks)),
	}
	for i, r := range c.Rules {
		out.Rules[i] = kernel.TableRule(r)
	}
	for nc, class := range c.Peers {
		out.Peers[kernel.NodeClass(nc)] = class
	}
	for prefix, classes := range c.Blocks {
		out.Blocks = append(out.Blocks, kernel.Block{Prefix: prefix, Classes: classes})
	}
	return out
}

func kernelNodes(nodes []policy.Node) []kernel.PortNode {
	out := make([]kernel.PortNode, len(nodes))
	for i, n := range nodes {
		out[i] = kernel.PortNode(n)
	}
	return out
}

// GrowTable implements policy.Kernel.
func (p Policies) GrowTable(t policy.Table, nodes []policy.Node, classes []uint32) error {
	return noRoom(p.Kernel.GrowTable(kernel.Table(t), kernelNodes(nodes), classes))
}

// SetPeer implements policy.Kernel.
func (p Policies) SetPeer(t policy.Table, nc policy.NodeClass, class uint16) error {
	return noRoom(p.Kernel.SetPeer(kernel.Table(t), kernel.NodeClass(nc), class))
}

// DeletePeer implements policy.Kernel.
func (p Policies) DeletePeer(t policy.Table, nc policy.NodeClass) error {
	return p.Kernel.DeletePeer(kernel.Table(t), kernel.NodeClass(nc))
}

// SetBlock implements policy.Kernel.
func (p Policies) SetBlock(t policy.Table, prefix netip.Prefix, classes [policy.Scopes]uint16) error {
	return noRoom(p.Kernel.SetBlock(kernel.Table(t), kernel.Block{Prefix: prefix, Classes: classes}))
}

// DeleteBlock implements policy.Kernel.
func (p Policies) DeleteBlock(t policy.Table, prefix netip.Prefix) error {
	return p.Kernel.DeleteBlock(kernel.Table(t), prefix)
}

// RetireTables implements policy.Kernel.
func (p Policies) RetireTables(ts ...policy.Table) error {
	list := make([]kernel.Table, len(ts))
	for i, t := range ts {
		list[i] = kernel.Table(t)
	}
	return p.Kernel.RetireTables(list...)
}

// Tables implements policy.Kernel.
func (p Policies) Tables() (map[policy.Table][32]byte, error) {
	list, err := p.Kernel.Tables()
	if err != nil {
		return nil, err
	}
	out := make(map[policy.Table][32]byte, len(list))
	for _, t := range list {
		out[policy.Table(t.ID)] = t.Hash
	}
	return out, nil
}

// TableContent implements policy.Kernel.
func (p Policies) TableContent(t policy.Table) (policy.Content, error) {
	c, err := p.Kernel.TableContent(kernel.Table(t))
	if err != nil {
		return policy.Content{}, err
	}
	out := policy.Content{
		Hash: c.Hash, DefaultAllow: c.DefaultAllow, HostAllow: c.HostAllow, HasAddresses: c.HasAddresses,
		DefaultClasses: c.DefaultClasses, AddressClasses: c.AddressClasses,
		Rules: make([]policy.Rule, len(c.Rules)), Classes: c.Classes, Nodes: make([]policy.Node, len(c.Nodes)),
		Peers:  make(map[policy.NodeClass]uint16, len(c.Peers)),
		Blocks: make(map[netip.Prefix][policy.Scopes]uint16, len(c.Blocks)),
	}
	for i, r := range c.Rules {
		out.Rules[i] = policy.Rule(r)
	}
	for i, n := range c.Nodes {
		out.Nodes[i] = policy.Node(n)
	}
	for nc, class := range c.Peers {
		out.Peers[policy.NodeClass(nc)] = class
	}
	for _, b := range c.Blocks {
		out.Blocks[b.Prefix] = b.Classes
	}
	return out, nil
}

// NodeClass implements policy.Kernel.
func (p Policies) NodeClass(key policy.ClassKey) (policy.NodeClass, error) {
	nc, err := p.Kernel.NodeClass(kernel.ClassKey(key))
	return policy.NodeClass(nc), noRoom(err)
}

// NodeClasses implements policy.Kernel.
func (p Policies) NodeClasses() (map[policy.ClassKey]policy.NodeClass, error) {
	list := p.Kernel.NodeClasses()
	out := make(map[policy.ClassKey]policy.NodeClass, len(list))
	for key, nc := range list {
		out[policy.ClassKey(key)] = policy.NodeClass(nc)
	}
	return out, nil
}

// RetireNodeClasses implements policy.Kernel.
func (p Policies) RetireNodeClasses(ncs ...policy.NodeClass) error {
	list := make([]kernel.NodeClass, len(ncs))
	for i, nc := range ncs {
		list[i] = kernel.NodeClass(nc)
	}
	return p.Kernel.RetireNodeClasses(list...)
}

// SetWords implements policy.Kernel.
func (p Policies) SetWords(ws map[uint32]policy.Word) error {
	out := make(map[kernel.Identity]kernel.IdentityWord, len(ws))
	for id, w := range ws {
		out[kernel.Identity(id)] = kernel.IdentityWord{
			Class: kernel.NodeClass(w.Class), Kind: kernel.Kind(w.Kind), Scope: kernel.Scope(w.Scope), Known: w.Known,
		}
	}
	return p.Kernel.SetIdentityWords(out)
}

// Words implements policy.Kernel.
func (p Policies) Words() (map[uint32]policy.Word, error) {
	ws, err := p.Kernel.IdentityWords()
	if err != nil {
		return nil, err
	}
	out := make(map[uint32]policy.Word, len(ws))
	for id, w := range ws {
		out[uint32(id)] = policy.Word{Class: policy.NodeClass(w.Class), Kind: uint8(w.Kind), Scope: uint8(w.Scope), Known: w.Known}
	}
	return out, nil
}

// SetPolicy implements policy.Kernel.
func (p Policies) SetPolicy(slot uint16, egress, ingress policy.Table) (uint32, error) {
	return p.Kernel.SetPolicy(kernel.Slot(slot), kernel.Table(egress), kernel.Table(ingress))
}

// BumpGens implements policy.Kernel.
func (p Policies) BumpGens(slots ...uint16) error {
	list := make([]kernel.Slot, len(slots))
	for i, s := range slots {
		list[i] = kernel.Slot(s)
	}
	return p.Kernel.BumpGens(list...)
}

// SetAudit implements policy.Kernel.
func (p Policies) SetAudit(slot uint16, on bool) error {
	return p.Kernel.SetAudit(kernel.Slot(slot), on)
}

// Endpoints implements policy.Kernel.
func (p Policies) Endpoints() ([]policy.Endpoint, error) {
	list, err := p.Kernel.Endpoints()
	if err != nil {
		return nil, err
	}
	out := make([]policy.Endpoint, 0, len(list))
	for _, e := range list {
		pe := policy.Endpoint{
			Slot: uint16(e.Slot), Identity: uint32(e.Identity),
			Egress: policy.Table(e.Policy.Egress), Ingress: policy.Table(e.Policy.Ingress), Generation: e.Policy.Gen,
		}
		for _, a := range []netip.Addr{e.IPv4, e.IPv6} {
			if a.IsValid() {
				pe.Addrs = append(pe.Addrs, a)
			}
		}
		out = append(out, pe)
	}
	return out, nil
}

// Barrier implements policy.Kernel.
func (p Policies) Barrier(ctx context.Context) error { return p.Kernel.Barrier(ctx) }

// noRoom gives full maps their meaning in the core.
func noRoom(err error) error {
	if errors.Is(err, kernel.ErrFull) {
		return fmt.Errorf("%w: %w", policy.ErrNoRoom, err)
	}
	return err
}

// Judges implements endpoint.Policies.
type Judges struct {
	Policy *policy.Applier
}

// Await implements endpoint.Policies.
func (j Judges) Await(ctx context.Context, identity uint32) error {
	return judgement(j.Policy.Await(ctx, identity))
}

// judgement gives the core's meaning to why nothing judges an endpoint.
func judgement(err error) error {
	for from, to := range map[error]error{policy.ErrUnavailable: endpoint.ErrUnavailable, policy.ErrNoRoom: endpoint.ErrFull} {
		if errors.Is(err, from) {
			return fmt.Errorf("%w: %w", to, err)
		}
	}
	return err
}

// Of implements endpoint.Policies.
func (j Judges) Of(slot uint16) (endpoint.Policy, bool) {
	p, ok := j.Policy.Of(slot)
	return endpoint.Policy{
		Revision: p.Revision, EgressTable: uint16(p.Egress), IngressTable: uint16(p.Ingress), Generation: p.Generation,
		Refusal: p.Refusal, Audit: p.Audit, Pending: p.Pending(),
	}, ok
}

// Unenforce gives every endpoint the table that allows everything and removes
// what a policy service had brought: no policy is wanted any more.
func Unenforce(k *kernel.Kernel) error {
	endpoints, err := k.Endpoints()
	if err != nil {
		return err
	}
	for _, e := range endpoints {
		p := e.Policy
		if p.Egress == kernel.TableDeny && p.Ingress == kernel.TableDeny || p.Egress == kernel.TableAllow && p.Ingress == kernel.TableAllow {
			continue
		}
		if _, err := k.SetPolicy(e.Slot, kernel.TableAllow, kernel.TableAllow); err != nil {
			return fmt.Errorf("policy of slot %d: %w", e.Slot, err)
		}
	}
	tables, err := k.Tables()
	if err != nil {
		return err
	}
	ids := make([]kernel.Table, len(tables))
	for i, t := range tables {
		ids[i] = t.ID
	}
	words, err := k.IdentityWords()
	if err != nil {
		return err
	}
	for id := range words {
		words[id] = kernel.IdentityWord{}
	}
	var classes []kernel.NodeClass
	for _, nc := range k.NodeClasses() {
		classes = append(classes, nc)
	}
	return errors.Join(k.RetireTables(ids...), k.SetIdentityWords(words), k.RetireNodeClasses(classes...))
}
