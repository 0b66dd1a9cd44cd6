// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// machine is a fake of the kernel and of the services, as this package uses them. One mutex guards
// everything.
type machine struct {
	mu sync.Mutex

	namespaces map[string]*namespace // by path
	nextInode  uint64
	devices    map[uint32]*device // devices of the node's namespace, by index
	nextIndex  uint32
	slots      map[uint16]endpoint.Entry
	nextSlot   uint16
	epoch      uint32
	leases     map[workload.Owner]lease
	identities map[workload.Owner]bool
	confirmed  map[workload.Owner]uint32 // identities, by Confirm
	records    map[workload.Owner]endpoint.Record
	bad        []endpoint.Unreadable

	fail   map[string]error         // errors to inject, by operation
	block  map[string]chan struct{} // operations that block first
	held   map[string]bool          // operations that block now
	calls  []string
	open   int    // number of open namespaces
	number uint32 // identity that Resolve returns
	tenant shares.Tenant

	halfway  error           // error of the next SetIdentity, after it has changed the identity
	isolates string          // reason of SetIdentityOrIsolate; empty: it does not isolate
	isolated map[uint16]bool // by slot
}

type namespace struct {
	id    endpoint.NamespaceID
	names map[string]uint32 // interfaces in the namespace and their host ends
}

type device struct {
	endpoint.Device
	up, configured, filtered bool

	rules   []netip.Addr // in the namespace
	foreign string       // program of another owner, attached before Sluice's
	ns      *namespace
}

type lease struct {
	addrs     []netip.Addr
	confirmed bool
	foreign   bool // another manager's
}

func newMachine() *machine {
	return &machine{
		isolated:   map[uint16]bool{},
		number:     1000,
		namespaces: map[string]*namespace{}, devices: map[uint32]*device{}, nextIndex: 10, slots: map[uint16]endpoint.Entry{}, nextSlot: 1,
		leases: map[workload.Owner]lease{}, identities: map[workload.Owner]bool{}, confirmed: map[workload.Owner]uint32{},
		records: map[workload.Owner]endpoint.Record{},
		fail:    map[string]error{}, block: map[string]chan struct{}{}, held: map[string]bool{},
	}
}

// do starts an operation. If it returns nil, mu is held and the caller unlocks it.
func (m *machine) do(op string) error { return m.within(context.Background(), op) }

// within is like do, but for an operation that waits no longer than ctx.
func (m *machine) within(ctx context.Context, op string) error {
	m.mu.Lock()
	wait := m.block[op]
	m.held[op] = wait != nil
	m.mu.Unlock()
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	m.mu.Lock()
	m.calls = append(m.calls, op)
	if err := m.fail[op]; err != nil {
		m.mu.Unlock()
		return err
	}
	return nil
}

func (m *machine) addNamespace(path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nextInode++
	m.namespaces[path] = &namespace{id: endpoint.NamespaceID{Dev: 4, Inode: m.nextInode}, names: map[string]uint32{}}
}

// removeNamespace removes its devices, too, as the kernel does.
func (m *machine) removeNamespace(path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, index := range m.namespaces[path].names {
		delete(m.devices, index)
	}
	delete(m.namespaces, path)
}

type openNamespace struct {
	m *machine
	n *namespace
}

func (o openNamespace) ID() endpoint.NamespaceID { return o.n.id }

func (o openNamespace) Cookie() (uint64, error) { return o.n.id.Inode, nil }

func (o openNamespace) Close() error {
	o.m.mu.Lock()
	defer o.m.mu.Unlock()
	o.m.open--
	return nil
}

type fakeLinks struct{ *machine }

func (l fakeLinks) OpenNamespace(path string) (endpoint.Namespace, error) {
	if err := l.do("open namespace"); err != nil {
		return nil, err
	}
	defer l.mu.Unlock()
	n, ok := l.namespaces[path]
	if !ok {
		return nil, fmt.Errorf("%s: %w", path, endpoint.ErrNamespaceGone)
	}
	l.open++
	return openNamespace{l.machine, n}, nil
}

func (l fakeLinks) Create(ns endpoint.Namespace, d endpoint.Device) (endpoint.Device, error) {
	if err := l.do("create device"); err != nil {
		return d, err
	}
	defer l.mu.Unlock()
	n := ns.(openNamespace).n
	if index, taken := n.names[d.Name]; taken {
		if old := l.devices[index]; old == nil || old.HostName != d.HostName {
			return d, endpoint.ErrNameTaken
		}
		delete(l.devices, index)
	}
	l.nextIndex++
	d.HostIndex, d.Index = l.nextIndex, 2
	n.names[d.Name] = d.HostIndex
	l.devices[d.HostIndex] = &device{Device: d, ns: n}
	return d, nil
}

func (l fakeLinks) change(op string, d endpoint.Device, fn func(*device)) error {
	if err := l.do(op); err != nil {
		return err
	}
	defer l.mu.Unlock()
	dev := l.devices[d.HostIndex]
	if dev == nil {
		return fmt.Errorf("device %d does not exist", d.HostIndex)
	}
	fn(dev)
	return nil
}

func (l fakeLinks) Configure(_ endpoint.Namespace, d endpoint.Device) error {
	return l.change("configure", d, func(dev *device) { dev.configured = true })
}

func (l fakeLinks) Attach(d endpoint.Device) error {
	return l.change("attach", d, func(dev *device) { dev.filtered = true })
}

func (l fakeLinks) Activate(_ endpoint.Namespace, d endpoint.Device) (endpoint.Device, error) {
	return d, l.change("activate", d, func(dev *device) { dev.up, dev.rules = true, d.SourceRouted })
}

func (l fakeLinks) Deactivate(_ endpoint.Namespace, d endpoint.Device) error {
	if err := l.do("deactivate"); err != nil {
		return err
	}
	defer l.mu.Unlock()
	if dev := l.devices[d.HostIndex]; dev != nil {
		dev.rules = nil
	}
	return nil
}

func (l fakeLinks) Remove(devices []endpoint.HostDevice) error {
	if err := l.do("remove devices"); err != nil {
		return err
	}
	defer l.mu.Unlock()
	for _, d := range devices {
		for index, dev := range l.devices {
			if d.Index == 0 && dev.HostName == d.Name {
				d.Index = index
			}
		}
		if dev := l.devices[d.Index]; dev != nil && dev.HostName == d.Name {
			delete(dev.ns.names, dev.Name)
			delete(l.devices, d.Index)
		}
	}
	return nil
}

func (l fakeLinks) Devices() ([]endpoint.HostDevice, error) {
	if err := l.do("list devices"); err != nil {
		return nil, err
	}
	defer l.mu.Unlock()
	var ds []endpoint.HostDevice
	for _, d := range l.devices {
		ds = append(ds, endpoint.HostDevice{Name: d.HostName, Index: d.HostIndex})
	}
	return ds, nil
}

func (l fakeLinks) CheckHost(d endpoint.Device) ([]endpoint.Difference, error) {
	if err := l.do("check device"); err != nil {
		return nil, err
	}
	defer l.mu.Unlock()
	dev := l.devices[d.HostIndex]
	if dev == nil {
		return []endpoint.Difference{{Subject: endpoint.SubjectDevice, Key: d.HostName, Want: "there"}}, nil
	}
	var diffs []endpoint.Difference
	if !dev.filtered {
		diffs = append(diffs, endpoint.Difference{Subject: endpoint.SubjectFilter, Key: d.HostName, Want: "ours"})
	}
	if !dev.up || !dev.configured {
		diffs = append(diffs, endpoint.Difference{Subject: "device state", Key: d.HostName, Want: "up"})
	}
	if dev.foreign != "" {
		diffs = append(diffs, endpoint.Difference{Subject: endpoint.SubjectTCX, Key: d.HostName, Have: dev.foreign})
	}
	return diffs, nil
}

func (l fakeLinks) CheckHosts(ds []endpoint.Device) ([][]endpoint.Difference, error) {
	var all [][]endpoint.Difference
	for _, d := range ds {
		diffs, err := l.CheckHost(d)
		if err != nil {
			return nil, err
		}
		all = append(all, diffs)
	}
	return all, nil
}

func (l fakeLinks) CheckContainer(_ endpoint.Namespace, d endpoint.Device) (diffs []endpoint.Difference, err error) {
	if err := l.do("check container"); err != nil {
		return nil, err
	}
	defer l.mu.Unlock()
	if dev := l.devices[d.HostIndex]; dev != nil && !slices.Equal(dev.rules, d.SourceRouted) {
		diffs = append(diffs, endpoint.Difference{Subject: "container rule", Key: d.Name})
	}
	return diffs, nil
}

func (l fakeLinks) RepairContainer(_ endpoint.Namespace, d endpoint.Device) error {
	return l.change("repair container", d, func(dev *device) { dev.rules = d.SourceRouted })
}

func (l fakeLinks) RepairHost(d endpoint.Device) error {
	return l.change("repair device", d, func(dev *device) { dev.up, dev.configured, dev.filtered = true, true, true })
}

func (l fakeLinks) CheckFilters(d endpoint.HostDevice) ([]endpoint.Difference, error) {
	if err := l.do("check filters"); err != nil {
		return nil, err
	}
	defer l.mu.Unlock()
	if dev := l.devices[d.Index]; dev != nil && !dev.filtered {
		return []endpoint.Difference{{Subject: endpoint.SubjectFilter, Key: d.Name, Want: "ours"}}, nil
	}
	return nil, nil
}

func (l fakeLinks) AttachTo(d endpoint.HostDevice) error {
	return l.change("attach", endpoint.Device{HostName: d.Name, HostIndex: d.Index}, func(dev *device) { dev.filtered = true })
}

type fakeMaps struct{ *machine }

func (f fakeMaps) Publish(_ context.Context, e endpoint.Entry) (uint16, error) {
	if err := f.do("publish"); err != nil {
		return 0, err
	}
	defer f.mu.Unlock()
	for _, other := range f.slots {
		for _, a := range e.Addrs {
			if slices.Contains(other.Addrs, a) {
				return 0, fmt.Errorf("%v: %w", a, endpoint.ErrAddressHeld)
			}
		}
	}
	e.Slot = f.nextSlot
	f.epoch++
	e.Epoch = f.epoch
	f.nextSlot++
	f.slots[e.Slot] = e
	return e.Slot, nil
}

func (f fakeMaps) Cut(slot uint16) error {
	if err := f.do("cut"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	e, ok := f.slots[slot]
	if !ok {
		return endpoint.ErrNotFound
	}
	e.Forwards = false
	f.slots[slot] = e
	return nil
}

func (f fakeMaps) Unpublish(slot uint16) error {
	if err := f.do("unpublish"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	if _, ok := f.slots[slot]; !ok {
		return endpoint.ErrNotFound
	}
	delete(f.slots, slot)
	return nil
}

func (f fakeMaps) SetIdentity(_ context.Context, slot uint16, identity uint32) error {
	if err := f.do("set identity"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	e := f.slots[slot]
	e.Identity = identity
	f.slots[slot] = e
	err := f.halfway
	f.halfway = nil
	return err
}

func (f fakeMaps) SetIdentityOrIsolate(ctx context.Context, slot uint16, identity uint32) (string, error) {
	if err := f.SetIdentity(ctx, slot, identity); err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.isolates != "" {
		f.isolated[slot] = true
	} else {
		delete(f.isolated, slot)
	}
	return f.isolates, nil
}

func (f fakeMaps) Entries() ([]endpoint.Entry, error) {
	if err := f.do("list entries"); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	var es []endpoint.Entry
	for _, e := range f.slots {
		es = append(es, e)
	}
	slices.SortFunc(es, func(a, b endpoint.Entry) int { return cmp.Compare(a.Slot, b.Slot) })
	return es, nil
}

type fakeLeases struct{ *machine }

func (f fakeLeases) Confirm(ctx context.Context, o workload.Owner, addrs []netip.Addr) error {
	if err := f.within(ctx, "confirm"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	l, ok := f.leases[o]
	if !ok || !slices.Equal(l.addrs, addrs) {
		return endpoint.ErrLease
	}
	f.leases[o] = lease{addrs: addrs, confirmed: true}
	return nil
}

func (f fakeLeases) Release(_ context.Context, o workload.Owner) error {
	if err := f.do("release lease"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	delete(f.leases, o)
	return nil
}

func (f fakeLeases) Claim(_ context.Context, o workload.Owner, addrs []netip.Addr) error {
	if err := f.do("claim"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	for other, l := range f.leases {
		if other != o && slices.ContainsFunc(addrs, func(a netip.Addr) bool { return slices.Contains(l.addrs, a) }) {
			return endpoint.ErrLease
		}
	}
	f.leases[o] = lease{addrs: addrs, confirmed: true}
	return nil
}

func (f fakeLeases) Confirmed(context.Context) (ours, others []workload.Owner, err error) {
	if err := f.do("list leases"); err != nil {
		return nil, nil, err
	}
	defer f.mu.Unlock()
	for o, l := range f.leases {
		switch {
		case !l.confirmed:
		case l.foreign:
			others = append(others, o)
		default:
			ours = append(ours, o)
		}
	}
	return ours, others, nil
}

type fakeIdentities struct{ *machine }

func (f fakeIdentities) Resolve(ctx context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	o, labels := s.Owner, s.Labels
	if err := f.within(ctx, "resolve"); err != nil {
		return endpoint.Identity{}, err
	}
	defer f.mu.Unlock()
	f.identities[o] = true
	return endpoint.Identity{Number: f.number, Labels: labels, Tenant: f.tenant}, nil
}

func (f fakeIdentities) Preview(_ context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	if err := f.do("preview"); err != nil {
		return endpoint.Identity{}, err
	}
	defer f.mu.Unlock()
	return endpoint.Identity{Number: f.number, Labels: s.Labels, Tenant: f.tenant}, nil
}

func (f fakeIdentities) Confirm(_ context.Context, o workload.Owner, number uint32) error {
	if err := f.do("confirm identity"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	f.confirmed[o] = number
	return nil
}

func (f fakeIdentities) Release(_ context.Context, o workload.Owner) error {
	if err := f.do("release identity"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	delete(f.identities, o)
	return nil
}

type fakeRecords struct{ *machine }

func (f fakeRecords) Save(r endpoint.Record) error {
	if err := f.do("save " + string(r.Phase)); err != nil {
		return err
	}
	defer f.mu.Unlock()
	if err := r.Validate(); err != nil {
		return fmt.Errorf("the core saves an invalid record: %w", err)
	}
	f.records[r.Spec.Owner] = r
	f.bad = slices.DeleteFunc(f.bad, func(u endpoint.Unreadable) bool { return u.Key == r.Spec.Owner.Key() })
	return nil
}

func (fakeRecords) Err() error { return nil }

func (f fakeRecords) Remove(o workload.Owner) error {
	if err := f.do("remove record"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	delete(f.records, o)
	return nil
}

func (f fakeRecords) Load() (rs []endpoint.Record, bad []endpoint.Unreadable, err error) {
	if err := f.do("load records"); err != nil {
		return nil, nil, err
	}
	defer f.mu.Unlock()
	for _, r := range f.records {
		rs = append(rs, r)
	}
	return rs, f.bad, nil
}

// setFail injects an error into an operation; nil removes it.
func (m *machine) setFail(op string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		delete(m.fail, op)
	} else {
		m.fail[op] = err
	}
}

var testCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/64")}

func (m *machine) config() Config {
	return Config{
		Instance: "test", BootID: "this boot", Ranges: podrange.Of(testCIDRs, false), MTU: 1500, ReapDelay: time.Nanosecond, RetryDelay: time.Millisecond,
		Maps: fakeMaps{m}, Links: fakeLinks{m}, Leases: fakeLeases{m}, Identities: fakeIdentities{m}, Records: fakeRecords{m},
		HostPorts: endpoint.NoHostPorts{},
	}
}

func discard(endpoint.Finding) error { return nil }

// node has all parts of one node, so that a test calls a method without naming its part.
type node struct {
	cfg *Config
	*Lifecycle
	*Relabeller
	*Allocations
	*Reconciler
	*HostEnds
	*NodeState
	*Report
}

func newNode(cfg Config) *node {
	p := New(cfg)
	return &node{
		p.Lifecycle.cfg, p.Lifecycle, p.Relabeller, p.Allocations, p.Reconciler, p.HostEnds, p.NodeState, p.Report,
	}
}

// Delete removes the owner's endpoint as its manager does.
func (n *node) Delete(ctx context.Context, o workload.Owner) (existed bool, err error) {
	_, existed, err = n.Remove(ctx, o, Removal{})
	return existed, err
}

// restore does the first part of a start, up to the comparison of devices.
func restore(t *testing.T, c *node) {
	t.Helper()
	if err := errors.Join(c.Restore(t.Context(), discard), c.Audit(t.Context(), true, discard)); err != nil {
		t.Fatal(err)
	}
}

// start returns a node after a complete start.
func (m *machine) start(t *testing.T) *node {
	t.Helper()
	c := newNode(m.config())
	restore(t, c)
	return c
}

// wanted creates a namespace and a lease, and returns a request for them.
func (m *machine) wanted(name string, last byte) endpoint.Spec {
	o := workload.Owner{ContainerID: name, Interface: "eth0"}
	s := endpoint.Spec{
		Owner: o, Netns: "/run/netns/" + name, Labels: []label.Label{{Source: "cni", Key: "app", Value: name}},
		Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, last}), netip.AddrFrom16([16]byte{0: 0xfd, 15: last})},
	}
	if m.namespaces[s.Netns] == nil {
		m.addNamespace(s.Netns)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.leases[o]; !ok {
		m.leases[o] = lease{addrs: s.Addrs}
	}
	return s
}

// settle runs the background work until none is left.
func settle(t *testing.T, c *node) {
	t.Helper()
	if err := c.releaseAll(t.Context()); err != nil {
		t.Fatalf("releases: %v", err)
	}
	for c.Reaper.Reap(c.cfg.ReapDelay/4) > 0 {
		if err := pause(t.Context(), time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
}

// holding counts everything that exists because of endpoints.
type holding struct {
	Devices, Slots, Confirmed, Identities, Records, Open, Known int
}

func (m *machine) holding(c *node) holding {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := holding{
		Devices: len(m.devices), Slots: len(m.slots), Identities: len(m.identities), Records: len(m.records), Open: m.open,
		Known: len(c.List()),
	}
	for _, l := range m.leases {
		if l.confirmed {
			h.Confirmed++
		}
	}
	return h
}

// holds fails the test unless exactly the state of n endpoints exists.
func (m *machine) holds(t *testing.T, c *node, n int) {
	t.Helper()
	want := holding{n, n, n, n, n, 0, n}
	if got := m.holding(c); !reflect.DeepEqual(got, want) {
		t.Errorf("left behind: %+v, want %+v", got, want)
	}
}

var errTest = errors.New("injected by the test")

func (m *machine) count(op string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, c := range m.calls {
		if c == op {
			n++
		}
	}
	return n
}

func (m *machine) deviceOf(o workload.Owner) *device { return m.devices[m.records[o].Device.HostIndex] }
