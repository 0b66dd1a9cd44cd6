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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/sluice-net/sluice/model/identity"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/learned"
	"github.com/sluice-net/sluice/services/datapath/internal/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// Policy implements policystream.Service.
type Policy struct {
	Health
	client policyv1.PolicyServiceClient
}

// NewPolicy uses a connection to policy's socket.
func NewPolicy(cc grpc.ClientConnInterface) *Policy {
	return &Policy{Health: Health{Name: "policy"}, client: policyv1.NewPolicyServiceClient(cc)}
}

// Ping asks whether the service answers, and sends tables: the error is
// policystream.ErrWaits if it waits for policies.
func (p *Policy) Ping(ctx context.Context) error {
	st, err := p.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
	if err != nil {
		return p.translate(err)
	}
	if why := st.GetWaitingFor(); len(why) > 0 {
		return fmt.Errorf("policy: %w: %s", policystream.ErrWaits, strings.Join(why, "; "))
	}
	return nil
}

// HoldAddresses implements learned.Service.
func (p *Policy) HoldAddresses(ctx context.Context, inUse []netip.Addr) ([]netip.Addr, error) {
	out, err := p.client.HoldAddresses(ctx, &policyv1.HoldAddressesRequest{InUse: wire.Addresses(inUse)})
	if status.Code(err) == codes.Unimplemented {
		return nil, learned.ErrUnsupported
	}
	if err := p.translate(err); err != nil {
		return nil, err
	}
	expiring := make([]netip.Addr, 0, len(out.GetExpiring()))
	for i, text := range out.GetExpiring() {
		a, err := wire.AddressOf(text)
		if err != nil {
			return nil, malformed("expiring[%d]: %v", i, err)
		}
		expiring = append(expiring, a)
	}
	return expiring, nil
}

// Subscribe implements policystream.Service.
func (p *Policy) Subscribe(ctx context.Context, s policystream.Subscription) (policystream.Stream, error) {
	stream, err := p.client.WatchPolicyTables(ctx)
	if err != nil {
		return nil, p.translate(err)
	}
	st := &policyStream{stream: stream, health: &p.Health}
	err = st.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: &policyv1.Subscribe{
		Name: s.Name, Incarnation: []byte(s.Incarnation), Seq: s.Seq, Subjects: s.Subjects, Locations: locations(s.Locations),
		Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Enforced: enforced(s.Enforced), Formats: []policyv1.TableFormat{format},
	}}})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// policyStream implements policystream.Stream.
type policyStream struct {
	stream grpc.BidiStreamingClient[policyv1.WatchPolicyTablesRequest, policyv1.WatchPolicyTablesResponse]
	health *Health
}

// Recv implements policystream.Stream.
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

// Subjects implements policystream.Stream.
func (s *policyStream) Subjects(add, remove []uint32) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subjects{
		Subjects: &policyv1.SubjectChange{Add: add, Remove: remove},
	}})
}

// Locate implements policystream.Stream.
func (s *policyStream) Locate(add map[netip.Addr]uint32, remove []netip.Addr) error {
	m := &policyv1.Locate{Add: locations(add), Remove: wire.Addresses(remove)}
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Locate{Locate: m}})
}

// Ack implements policystream.Stream.
func (s *policyStream) Ack(seq uint64) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Ack{Ack: &policyv1.Ack{Seq: seq}}})
}

// Hold implements policystream.Stream.
func (s *policyStream) Hold(h policystream.Hold) error {
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

func enforced(e *policystream.Enforced) *policyv1.EnforcedState {
	if e == nil {
		return nil
	}
	return &policyv1.EnforcedState{State: []byte(e.State), Revision: e.Revision, Sources: e.Sources}
}

// Nack implements policystream.Stream.
func (s *policyStream) Nack(n policystream.Nack) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{
		Seq: n.Seq, Subject: n.Subject, Table: n.Table, Reason: n.Reason,
	}}})
}

func locations(m map[netip.Addr]uint32) []*policyv1.Location {
	var out []*policyv1.Location
	for _, a := range slices.SortedFunc(maps.Keys(m), netip.Addr.Compare) {
		out = append(out, &policyv1.Location{Address: a.String(), Identity: m[a]})
	}
	return out
}

// format is what the steps look like that this datapath understands.
const format = policyv1.TableFormat_TABLE_FORMAT_RANGES

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
	if m.GetFormat() != format {
		return out, malformed("format: the policy service sends tables as %v, this datapath understands %v: both must be of one release", m.GetFormat(), format)
	}
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
	case *policyv1.Step_DefineIdentityClass:
		x := s.DefineIdentityClass
		if len(x.GetKey()) != len(policytable.ClassKey{}) {
			return nil, malformed("define_identity_class.key: %d bytes, want %d", len(x.GetKey()), len(policytable.ClassKey{}))
		}
		return policytable.DefineIdentityClass{IdentityClass: x.GetIdentityClass(), Key: policytable.ClassKey(x.GetKey())}, nil
	case *policyv1.Step_RetireIdentityClass:
		return policytable.RetireIdentityClass{IdentityClass: s.RetireIdentityClass.GetIdentityClass()}, nil
	case *policyv1.Step_SetIdentity:
		return setIdentity(s.SetIdentity)
	case *policyv1.Step_DefineTable:
		st, err := defineTable(s.DefineTable)
		if err != nil {
			return nil, fmt.Errorf("define_table.%w", err)
		}
		return st, nil
	case *policyv1.Step_GrowTable:
		classes, err := peerClasses(s.GrowTable.GetClasses())
		if err != nil {
			return nil, fmt.Errorf("grow_table.%w", err)
		}
		return policytable.GrowTable{Table: s.GrowTable.GetTable(), Classes: classes}, nil
	case *policyv1.Step_RetireTable:
		return policytable.RetireTable{Table: s.RetireTable.GetTable()}, nil
	case *policyv1.Step_SetPeer:
		r, err := row(s.SetPeer.GetRow())
		if err != nil {
			return nil, fmt.Errorf("set_peer.row.%w", err)
		}
		return policytable.SetPeer{Table: s.SetPeer.GetTable(), Row: r}, nil
	case *policyv1.Step_DeletePeer:
		return policytable.DeletePeer{Table: s.DeletePeer.GetTable(), IdentityClass: s.DeletePeer.GetIdentityClass()}, nil
	case *policyv1.Step_SetPrefix:
		p, classes, err := prefixClasses(s.SetPrefix.GetPrefix())
		if err != nil {
			return nil, fmt.Errorf("set_prefix.prefix.%w", err)
		}
		return policytable.SetPrefix{Table: s.SetPrefix.GetTable(), Prefix: p, Classes: classes}, nil
	case *policyv1.Step_DeletePrefix:
		p, err := prefix(s.DeletePrefix.GetPrefix())
		if err != nil {
			return nil, fmt.Errorf("delete_prefix.%w", err)
		}
		return policytable.DeletePrefix{Table: s.DeletePrefix.GetTable(), Prefix: p}, nil
	case *policyv1.Step_BindSubject:
		return bindSubject(s.BindSubject)
	case *policyv1.Step_RemoveSubject:
		return policytable.RemoveSubject{Subject: s.RemoveSubject.GetSubject()}, nil
	case *policyv1.Step_Barrier:
		return barrier(s.Barrier)
	case *policyv1.Step_SnapshotComplete:
		return policytable.SnapshotComplete{}, nil
	}
	field, _, _ := protowire.ConsumeTag(s.ProtoReflect().GetUnknown())
	return policytable.UnknownStep{Field: int32(field)}, nil
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

func setIdentity(x *policyv1.SetIdentity) (policytable.Step, error) {
	st := policytable.SetIdentity{Identity: x.GetIdentity(), IdentityClass: x.GetIdentityClass()}
	if x.GetIdentityClass() == 0 {
		return st, nil
	}
	if x.GetKind() < 1 || x.GetKind() > policyv1.PeerKind(identity.Kinds) {
		return nil, malformed("set_identity.kind: %d", x.GetKind())
	}
	if x.GetScope() < 1 || x.GetScope() > policyv1.PeerScope(identity.PeerScopes) {
		return nil, malformed("set_identity.scope: %d", x.GetScope())
	}
	st.Kind, st.Scope = identity.Kind(x.GetKind()-1), identity.PeerScope(x.GetScope()-1) //nolint:gosec // checked
	return st, nil
}

func defineTable(x *policyv1.PolicyTable) (policytable.Step, error) {
	st := policytable.DefineTable{Table: x.GetTable()}
	c := &st.Content
	if len(x.GetStructureHash()) != len(c.Hash) {
		return nil, malformed("structure_hash: %d bytes, want %d", len(x.GetStructureHash()), len(c.Hash))
	}
	c.Hash = [32]byte(x.GetStructureHash())
	c.DefaultAllow, c.HostAllow, c.HasAddresses = x.GetDefaultAllow(), x.GetHostAllow(), x.GetHasAddresses()
	err := keyed("default_classes", len(x.GetDefaultClasses()), c.DefaultClasses[:], func(i int) (int32, uint32) {
		e := x.GetDefaultClasses()[i]
		return int32(e.GetKind()), e.GetClass()
	})
	if err != nil {
		return nil, err
	}
	if c.AddressClasses, err = scopeClasses("address_classes", x.GetAddressClasses()); err != nil {
		return nil, err
	}
	c.Rules = make([]policytable.Rule, len(x.GetRules()))
	for i, r := range x.GetRules() {
		if r.GetAction() < 1 || r.GetAction() > policyv1.Action_ACTION_PASS ||
			r.GetTier() < 1 || r.GetTier() > policyv1.Tier_TIER_BASELINE || r.GetProxy() < 0 || r.GetProxy() > 0xFFFF {
			return nil, malformed("rules[%d]: action %d, tier %d, proxy %d", i, r.GetAction(), r.GetTier(), r.GetProxy())
		}
		c.Rules[i] = policytable.Rule{Action: policytable.Action(r.GetAction() - 1), Tier: uint8(r.GetTier() - 1), Proxy: uint16(r.GetProxy())} //nolint:gosec // checked
	}
	if c.Classes, err = peerClasses(x.GetClasses()); err != nil {
		return nil, err
	}
	st.Peers = make([]policytable.Row, len(x.GetPeers()))
	for i, p := range x.GetPeers() {
		if st.Peers[i], err = row(p); err != nil {
			return nil, fmt.Errorf("peers[%d].%w", i, err)
		}
	}
	c.Prefixes = make(map[netip.Prefix]policytable.PrefixClasses, len(x.GetPrefixes()))
	for i, b := range x.GetPrefixes() {
		p, cs, err := prefixClasses(b)
		if err != nil {
			return nil, fmt.Errorf("prefixes[%d].%w", i, err)
		}
		if _, twice := c.Prefixes[p]; twice {
			return nil, malformed("prefixes[%d]: %v is there twice", i, p)
		}
		c.Prefixes[p] = cs
	}
	return st, nil
}

// keyed takes the entries of a list that goes by an enum: each of its values
// after 0 once. entry gives value and class of an entry.
func keyed(field string, n int, to []policytable.Class, entry func(i int) (key int32, class uint32)) error {
	if n != len(to) {
		return malformed("%s: %d entries, want %d", field, n, len(to))
	}
	seen := make([]bool, len(to))
	for i := range n {
		key, class := entry(i)
		switch {
		case key < 1 || int(key) > len(to):
			return malformed("%s[%d]: there is no %d", field, i, key)
		case seen[key-1]:
			return malformed("%s[%d]: %d is there twice", field, i, key)
		case class > 0xFFFF:
			return malformed("%s[%d].class: there is no class %d", field, i, class)
		}
		seen[key-1], to[key-1] = true, policytable.Class(class)
	}
	return nil
}

func scopeClasses(field string, list []*policyv1.ScopeClass) (out policytable.PrefixClasses, err error) {
	err = keyed(field, len(list), out[:], func(i int) (int32, uint32) { return int32(list[i].GetScope()), list[i].GetClass() })
	return out, err
}

func peerClasses(list []*policyv1.PeerClass) ([]policytable.Ranges, error) {
	out := make([]policytable.Ranges, len(list))
	for i, c := range list {
		out[i] = make(policytable.Ranges, len(c.GetRanges()))
		for j, r := range c.GetRanges() {
			if r.GetAdmin() > 0xFFFF || r.GetRest() > 0xFFFF {
				return nil, malformed("classes[%d].ranges[%d]: rules %d and %d", i, j, r.GetAdmin(), r.GetRest())
			}
			out[i][j] = policytable.PortRange{First: r.GetFirst(), Last: r.GetLast(), Admin: uint16(r.GetAdmin()), Rest: uint16(r.GetRest())} //nolint:gosec // checked
		}
	}
	return out, nil
}

func row(r *policyv1.PeerRow) (policytable.Row, error) {
	if r.GetIdentityClass() == 0 {
		return policytable.Row{}, malformed("identity_class is 0")
	}
	if r.GetClass() > 0xFFFF {
		return policytable.Row{}, malformed("class: there is no class %d", r.GetClass())
	}
	return policytable.Row{IdentityClass: r.GetIdentityClass(), Class: uint16(r.GetClass())}, nil
}

func prefixClasses(b *policyv1.PrefixClasses) (p netip.Prefix, cs policytable.PrefixClasses, err error) {
	if p, err = prefix(b.GetPrefix()); err != nil {
		return p, cs, err
	}
	cs, err = scopeClasses("classes", b.GetClasses())
	return p, cs, err
}

func prefix(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Addr().Is4In6() || p != p.Masked() {
		return netip.Prefix{}, malformed("prefix: %q is none", text)
	}
	return p, nil
}

func bindSubject(x *policyv1.BindSubject) (policytable.Step, error) {
	st := policytable.BindSubject{Subject: x.GetSubject(), Table: x.GetTable(), Revision: x.GetPolicyRevision()}
	st.Tenant, st.Guarantee = wire.ReadTenant(x.GetTenant())
	switch x.GetDirection() {
	case netv1.Direction_DIRECTION_EGRESS:
		st.Direction = policytable.Egress
	case netv1.Direction_DIRECTION_INGRESS:
		st.Direction = policytable.Ingress
	default:
		return nil, malformed("bind_subject.direction: %d", x.GetDirection())
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
