// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/policysync"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// Policy implements policysync.Service.
type Policy struct {
	Health
	client policyv1.PolicyServiceClient
}

// NewPolicy uses a connection to policy's socket.
func NewPolicy(cc grpc.ClientConnInterface) *Policy {
	return &Policy{Health: Health{Name: "policy"}, client: policyv1.NewPolicyServiceClient(cc)}
}

// Ping asks whether the service answers.
func (p *Policy) Ping(ctx context.Context) error {
	_, err := p.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
	return p.translate(err)
}

// Subscribe implements policysync.Service.
func (p *Policy) Subscribe(ctx context.Context, s policysync.Subscription) (policysync.Stream, error) {
	stream, err := p.client.WatchPolicyTables(ctx)
	if err != nil {
		return nil, p.translate(err)
	}
	st := &policyStream{stream: stream, health: &p.Health}
	err = st.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: &policyv1.Subscribe{
		Name: s.Name, Incarnation: []byte(s.Incarnation), Seq: s.Seq, Subjects: s.Subjects, Locations: locations(s.Locations),
		Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Enforced: enforced(s.Enforced),
	}}})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// policyStream implements policysync.Stream.
type policyStream struct {
	stream grpc.BidiStreamingClient[policyv1.WatchPolicyTablesRequest, policyv1.WatchPolicyTablesResponse]
	health *Health
}

// Recv implements policysync.Stream.
func (s *policyStream) Recv() (policytable.Message, error) {
	m, err := s.stream.Recv()
	if err != nil {
		if terr := s.health.translate(err); terr != nil {
			err = terr
		}
		return policytable.Message{}, fmt.Errorf("policy tables: %w", err)
	}
	s.health.note(nil)
	return message(m)
}

// send reports why the stream has ended rather than that it has.
func (s *policyStream) send(m *policyv1.WatchPolicyTablesRequest) error {
	if err := s.stream.Send(m); err != nil {
		return fmt.Errorf("policy tables: send: %w", err)
	}
	return nil
}

// Subjects implements policysync.Stream.
func (s *policyStream) Subjects(add, remove []uint32) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subjects{
		Subjects: &policyv1.SubjectChange{Add: add, Remove: remove},
	}})
}

// Locate implements policysync.Stream.
func (s *policyStream) Locate(add map[netip.Addr]uint32, remove []netip.Addr) error {
	m := &policyv1.Locate{Add: locations(add)}
	for _, a := range remove {
		m.Remove = append(m.Remove, a.AsSlice())
	}
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Locate{Locate: m}})
}

// Ack implements policysync.Stream.
func (s *policyStream) Ack(seq uint64) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Ack{Ack: &policyv1.Ack{Seq: seq}}})
}

// Hold implements policysync.Stream.
func (s *policyStream) Hold(h policysync.Hold) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Hold{Hold: &policyv1.Hold{
		Seq: h.Seq, Revision: h.Revision, Reason: clip(h.Reason),
	}}})
}

// maxReason is how long a reason may be, in characters.
const maxReason = 1024

func clip(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxReason {
		return s
	}
	return strings.ToValidUTF8(s[:maxReason], "")
}

func enforced(e *policysync.Enforced) *policyv1.EnforcedState {
	if e == nil {
		return nil
	}
	return &policyv1.EnforcedState{State: []byte(e.State), Revision: e.Revision, Sources: e.Sources}
}

// Nack implements policysync.Stream.
func (s *policyStream) Nack(n policysync.Nack) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{
		Seq: n.Seq, Subject: n.Subject, Table: n.Table, Reason: n.Reason,
	}}})
}

func locations(m map[netip.Addr]uint32) []*policyv1.Location {
	var out []*policyv1.Location
	for _, a := range slices.SortedFunc(maps.Keys(m), netip.Addr.Compare) {
		out = append(out, &policyv1.Location{Address: a.AsSlice(), Identity: m[a]})
	}
	return out
}

// Bounds of what one message may bring, before anything of it is looked at.
const (
	maxIncarnation = 16
	maxSteps       = 1 << 20
	maxState       = 16
	maxSources     = 1024
	maxSource      = 128 // bytes
)

// message takes the shape of a message apart: lengths, ranges of types, enums.
// Whether the numbers in it mean anything is for package policy.
func message(m *policyv1.WatchPolicyTablesResponse) (policytable.Message, error) {
	out := policytable.Message{Incarnation: string(m.GetIncarnation()), Seq: m.GetSeq()}
	if n := len(m.GetIncarnation()); n == 0 || n > maxIncarnation {
		return out, malformed("incarnation: %d bytes, want 1 to %d", n, maxIncarnation)
	}
	if n := len(m.GetSteps()); n > maxSteps {
		return out, malformed("steps: %d, at most %d", n, maxSteps)
	}
	out.Steps = make([]policytable.Step, len(m.GetSteps()))
	for i, s := range m.GetSteps() {
		st, err := step(s)
		if err != nil {
			return out, fmt.Errorf("steps[%d].%w", i, err)
		}
		out.Steps[i] = st
	}
	return out, nil
}

func malformed(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, policytable.ErrInvalid)...)
}

func step(s *policyv1.Step) (policytable.Step, error) {
	switch s := s.GetStep().(type) {
	case *policyv1.Step_NodeClassDefine:
		x := s.NodeClassDefine
		if len(x.GetKey()) != len(policytable.ClassKey{}) {
			return nil, malformed("node_class_define.key: %d bytes, want %d", len(x.GetKey()), len(policytable.ClassKey{}))
		}
		return policytable.DefineIdentityClass{IdentityClass: x.GetNodeClass(), Key: policytable.ClassKey(x.GetKey())}, nil
	case *policyv1.Step_NodeClassRetire:
		return policytable.RetireIdentityClass{IdentityClass: s.NodeClassRetire.GetNodeClass()}, nil
	case *policyv1.Step_IdentityUpdate:
		return identityUpdate(s.IdentityUpdate)
	case *policyv1.Step_TableDefine:
		st, err := tableDefine(s.TableDefine)
		if err != nil {
			return nil, fmt.Errorf("table_define.%w", err)
		}
		return st, nil
	case *policyv1.Step_TableGrow:
		ns, err := nodes(s.TableGrow.GetNodes())
		if err != nil {
			return nil, fmt.Errorf("table_grow.%w", err)
		}
		return policytable.GrowTable{Table: s.TableGrow.GetTable(), Nodes: ns, Classes: s.TableGrow.GetClasses()}, nil
	case *policyv1.Step_TableRetire:
		return policytable.RetireTable{Table: s.TableRetire.GetTable()}, nil
	case *policyv1.Step_PeerUpdate:
		r, err := row(s.PeerUpdate.GetRow())
		if err != nil {
			return nil, fmt.Errorf("peer_update.row.%w", err)
		}
		if s.PeerUpdate.GetDelete() {
			return policytable.DeletePeer{Table: s.PeerUpdate.GetTable(), IdentityClass: r.IdentityClass}, nil
		}
		return policytable.SetPeer{Table: s.PeerUpdate.GetTable(), Row: r}, nil
	case *policyv1.Step_AddressUpdate:
		x := s.AddressUpdate
		prefix, classes, err := block(x.GetBlock(), x.GetDelete())
		if err != nil {
			return nil, fmt.Errorf("address_update.block.%w", err)
		}
		if x.GetDelete() {
			return policytable.DeletePrefix{Table: x.GetTable(), Prefix: prefix}, nil
		}
		return policytable.SetPrefix{Table: x.GetTable(), Prefix: prefix, Classes: classes}, nil
	case *policyv1.Step_Bind:
		return bind(s.Bind)
	case *policyv1.Step_SubjectGone:
		return policytable.RemoveSubject{Subject: s.SubjectGone.GetSubject()}, nil
	case *policyv1.Step_Barrier:
		return barrier(s.Barrier)
	case *policyv1.Step_SnapshotComplete:
		return policytable.SnapshotComplete{}, nil
	}
	return nil, malformed("step: of no known kind")
}

func barrier(x *policyv1.Barrier) (policytable.Step, error) {
	if n := len(x.GetState()); n > maxState {
		return nil, malformed("barrier.state: %d bytes, at most %d", n, maxState)
	}
	has, err := sourceNames("sources", x.GetSources())
	if err != nil {
		return nil, err
	}
	incomplete, err := sourceNames("incomplete", x.GetIncomplete())
	if err != nil {
		return nil, err
	}
	return policytable.Barrier{
		PolicyRevision: x.GetPolicyRevision(), IdentityRevision: x.GetIdentityRevision(), AddressRevision: x.GetAddressRevision(),
		State: string(x.GetState()), Sources: has, Incomplete: incomplete,
	}, nil
}

// sourceNames checks names of sources. Beyond a bound they are left out: one that is
// there is as good as all.
func sourceNames(field string, names []string) ([]string, error) {
	names = names[:min(len(names), maxSources)]
	for i, name := range names {
		if len(name) > maxSource {
			return nil, malformed("barrier.%s[%d]: %d bytes, at most %d", field, i, len(name), maxSource)
		}
	}
	return names, nil
}

func identityUpdate(x *policyv1.IdentityUpdate) (policytable.Step, error) {
	st := policytable.SetIdentity{Identity: x.GetIdentity(), IdentityClass: x.GetNodeClass()}
	if x.GetNodeClass() == 0 {
		return st, nil
	}
	if x.GetKind() < 1 || x.GetKind() > policytable.Kinds {
		return nil, malformed("identity_update.kind: %d", x.GetKind())
	}
	if x.GetScope() < 1 || x.GetScope() > policytable.Scopes {
		return nil, malformed("identity_update.scope: %d", x.GetScope())
	}
	st.Kind, st.Scope = policytable.Kind(x.GetKind()-1), policytable.Scope(x.GetScope()-1) //nolint:gosec // checked
	return st, nil
}

func tableDefine(x *policyv1.TableDefine) (policytable.Step, error) {
	st := policytable.DefineTable{Table: x.GetTable()}
	c := &st.Content
	if len(x.GetStructureHash()) != len(c.Hash) {
		return nil, malformed("structure_hash: %d bytes, want %d", len(x.GetStructureHash()), len(c.Hash))
	}
	c.Hash = [32]byte(x.GetStructureHash())
	c.DefaultAllow, c.HostAllow, c.HasAddresses = x.GetDefaultAllow(), x.GetHostAllow(), x.GetHasAddresses()
	if err := classes("default_classes", x.GetDefaultClasses(), c.DefaultClasses[:]); err != nil {
		return nil, err
	}
	if err := classes("address_classes", x.GetAddressClasses(), c.AddressClasses[:]); err != nil {
		return nil, err
	}
	c.Rules = make([]policytable.Rule, len(x.GetRules()))
	for i, r := range x.GetRules() {
		if r.GetAction() < 1 || r.GetAction() > policyv1.Action_ACTION_PASS || r.GetTier() > 3 || r.GetProxy() > 0xFFFF {
			return nil, malformed("rules[%d]: action %d, tier %d, proxy %d", i, r.GetAction(), r.GetTier(), r.GetProxy())
		}
		c.Rules[i] = policytable.Rule{Action: policytable.Action(r.GetAction() - 1), Tier: uint8(r.GetTier()), Proxy: uint16(r.GetProxy())} //nolint:gosec // checked
	}
	c.Classes = x.GetClasses()
	var err error
	if c.Nodes, err = nodes(x.GetNodes()); err != nil {
		return nil, err
	}
	st.Peers = make([]policytable.Row, len(x.GetPeers()))
	for i, p := range x.GetPeers() {
		if st.Peers[i], err = row(p); err != nil {
			return nil, fmt.Errorf("peers[%d].%w", i, err)
		}
	}
	c.Prefixes = make(map[netip.Prefix]policytable.PrefixClasses, len(x.GetBlocks()))
	for i, b := range x.GetBlocks() {
		prefix, cs, err := block(b, false)
		if err != nil {
			return nil, fmt.Errorf("blocks[%d].%w", i, err)
		}
		if _, twice := c.Prefixes[prefix]; twice {
			return nil, malformed("blocks[%d]: %v is there twice", i, prefix)
		}
		c.Prefixes[prefix] = cs
	}
	return st, nil
}

// classes are exactly as many as there is room for.
func classes(field string, from []uint32, to []uint16) error {
	if len(from) != len(to) {
		return malformed("%s: %d entries, want %d", field, len(from), len(to))
	}
	for i, c := range from {
		if c > 0xFFFF {
			return malformed("%s[%d]: there is no class %d", field, i, c)
		}
		to[i] = uint16(c)
	}
	return nil
}

func nodes(list []*policyv1.PortNode) ([]policytable.PortNode, error) {
	out := make([]policytable.PortNode, len(list))
	for i, n := range list {
		if len(n.GetHigh()) != policytable.Fanout || len(n.GetValue()) != policytable.Fanout {
			return nil, malformed("nodes[%d]: %d highs and %d values, want %d", i, len(n.GetHigh()), len(n.GetValue()), policytable.Fanout)
		}
		out[i] = policytable.PortNode{High: [policytable.Fanout]uint32(n.GetHigh()), Value: [policytable.Fanout]uint32(n.GetValue())}
	}
	return out, nil
}

func row(r *policyv1.PeerRow) (policytable.Row, error) {
	if r.GetNodeClass() == 0 {
		return policytable.Row{}, malformed("node_class is 0")
	}
	if r.GetClass() > 0xFFFF {
		return policytable.Row{}, malformed("class: there is no class %d", r.GetClass())
	}
	return policytable.Row{IdentityClass: r.GetNodeClass(), Class: uint16(r.GetClass())}, nil
}

func block(b *policyv1.AddressBlock, only bool) (p netip.Prefix, cs policytable.PrefixClasses, err error) {
	addr, ok := netip.AddrFromSlice(b.GetAddress())
	if !ok {
		return p, cs, malformed("address: %d bytes, want 4 or 16", len(b.GetAddress()))
	}
	if b.GetBits() > uint32(addr.BitLen()) { //nolint:gosec // 32 or 128
		return p, cs, malformed("bits: %d, at most %d", b.GetBits(), addr.BitLen())
	}
	p = netip.PrefixFrom(addr, int(b.GetBits()))
	if only {
		return p, cs, nil
	}
	return p, cs, classes("classes", b.GetClasses(), cs[:])
}

func bind(x *policyv1.Bind) (policytable.Step, error) {
	st := policytable.BindSubject{Subject: x.GetSubject(), Table: x.GetTable(), Revision: x.GetPolicyRevision()}
	switch x.GetDirection() {
	case policyv1.TableDirection_TABLE_DIRECTION_EGRESS:
		st.Direction = policytable.Egress
	case policyv1.TableDirection_TABLE_DIRECTION_INGRESS:
		st.Direction = policytable.Ingress
	default:
		return nil, malformed("bind.direction: %d", x.GetDirection())
	}
	st.Rules = make([][]policytable.Source, len(x.GetRules()))
	for i, r := range x.GetRules() {
		st.Rules[i] = make([]policytable.Source, len(r.GetSources()))
		for j, src := range r.GetSources() {
			st.Rules[i][j] = policytable.Source{Kind: src.GetKind(), Namespace: src.GetNamespace(), Name: src.GetName(), Path: src.GetPath()}
		}
	}
	return st, nil
}
