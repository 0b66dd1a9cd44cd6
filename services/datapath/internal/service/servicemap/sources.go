// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// frontBits is the number of bits of the front ID in keys of sl_src4 and sl_src6.
const frontBits = 32

var sourceMap = [families]string{bpf.MapsMapSlSrc4, bpf.MapsMapSlSrc6}

// source is a source range of a front: clients in it may connect.
type source struct {
	front  uint32
	prefix netip.Prefix
}

// String returns, for example, "front 7 192.0.2.0/24".
func (s source) String() string { return fmt.Sprintf("front %d %v", s.front, s.prefix) }

// source4 and source6 decode a key.

func source4(k *bpf.MapsSlSrcKey4) source {
	return source{k.Front, netip.PrefixFrom(netip.AddrFrom4(k.Addr), int(k.Bits)-frontBits)}
}

func source6(k *bpf.MapsSlSrcKey6) source {
	return source{k.Front, netip.PrefixFrom(netip.AddrFrom16(k.Addr), int(k.Bits)-frontBits)}
}

func (s source) family() int { return familyOf(s.prefix.Addr()) }

// key returns the key in the map of the source's family.
func (s source) key() any {
	a, bits := s.prefix.Addr(), uint32(frontBits+s.prefix.Bits())
	if a.Is4() {
		return &bpf.MapsSlSrcKey4{Bits: bits, Front: s.front, Addr: a.As4()}
	}
	return &bpf.MapsSlSrcKey6{Bits: bits, Front: s.front, Addr: a.As16()}
}

func (m *rawMaps) insertSource(s source) error {
	if m.before != nil {
		m.before(sourceMap[s.family()])
	}
	err := pin.InsertOnce(m.sources[s.family()], s.key(), uint32(1))
	if err != nil && !errors.Is(err, pin.ErrExists) {
		return fmt.Errorf("map %s: %w", sourceMap[s.family()], err)
	}
	return nil
}

func (m *rawMaps) deleteSource(s source) error {
	if m.before != nil {
		m.before(sourceMap[s.family()])
	}
	if err := pin.DeleteKey(m.sources[s.family()], s.key()); err != nil {
		return fmt.Errorf("map %s: %w", sourceMap[s.family()], err)
	}
	return nil
}

// eachSource calls f for all sources.
func (m *rawMaps) eachSource(f func(source)) error {
	var value uint32
	var k4 bpf.MapsSlSrcKey4
	it := m.sources[ip4].Iterate()
	for it.Next(&k4, &value) {
		f(source4(&k4))
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list map %s: %w", sourceMap[ip4], err)
	}
	var k6 bpf.MapsSlSrcKey6
	it = m.sources[ip6].Iterate()
	for it.Next(&k6, &value) {
		f(source6(&k6))
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list map %s: %w", sourceMap[ip6], err)
	}
	return nil
}

// sourcesOf returns the source ranges of the frontend's family, sorted. A frontend that only has source ranges of the
// other family allows no clients.
func sourcesOf(f *frontend.Frontend) []netip.Prefix {
	var ps []netip.Prefix
	for _, p := range f.SourceRanges {
		if p.Addr().Is4() == f.Key.Addr.Is4() {
			ps = append(ps, p.Masked())
		}
	}
	slices.SortFunc(ps, netip.Prefix.Compare)
	return slices.Compact(ps)
}

func hasPrefix(ps []netip.Prefix, p netip.Prefix) bool {
	_, ok := slices.BinarySearchFunc(ps, p, netip.Prefix.Compare)
	return ok
}

// missing returns the number of sources that the part needs and its front does not have.
func (p *part) missing() (n int) {
	for _, s := range p.sources {
		if p.front == nil || !hasPrefix(p.front.sources, s) {
			n++
		}
	}
	return n
}

// sourceUse counts the sources by tenant.
type sourceUse struct {
	held shares.Held
	of   map[shares.Tenant]int
}

// use changes the number of a tenant's sources.
func (u *sourceUse) use(t shares.Tenant, n int) {
	u.held.Add(t, n)
	if u.of[t] += n; u.of[t] == 0 {
		delete(u.of, t)
	}
}

// fit returns an error if a tenant may not have n more sources.
func (u *sourceUse) fit(t shares.Tenant, n int, mapName string) error {
	has := u.of[t]
	most := u.held.Most(t, has)
	if n == 0 || has+n <= most {
		return nil
	}
	return fmt.Errorf("source ranges: %s has %d and may have %d: %w", t, has, most,
		&frontendtx.NoRoomError{Map: mapName, Need: n, Free: max(0, most-has), Limit: quarter(u.held.Size)})
}

// allow adds prefixes to the sources of a front. If a write fails, clients in that prefix are rejected until an audit
// repairs it.
func (a *application) allow(f *front, want []netip.Prefix) {
	for _, p := range want {
		if hasPrefix(f.sources, p) {
			continue
		}
		a.s.nSources[familyOf(p.Addr())]++
		a.s.sourceUse[familyOf(p.Addr())].use(f.tenant, 1)
		if err := a.s.insertSource(source{f.number, p}); err != nil {
			a.errs = append(a.errs, fmt.Errorf("frontend %v: allow clients in %v: %w", f.key, p, err))
		}
	}
}

// restrict removes all sources of a front that are not in want.
func (a *application) restrict(f *front, want []netip.Prefix) {
	for _, p := range f.sources {
		if hasPrefix(want, p) {
			continue
		}
		a.s.nSources[familyOf(p.Addr())]--
		a.s.sourceUse[familyOf(p.Addr())].use(f.tenant, -1)
		if err := a.s.deleteSource(source{f.number, p}); err != nil {
			a.errs = append(a.errs, fmt.Errorf("frontend %v: remove clients in %v: %w", f.key, p, err))
		}
	}
	f.sources = want
}

// adoptSources assigns the sources in the maps to their fronts. Others are left to the audit.
func (s *store) adoptSources() error {
	err := s.eachSource(func(src source) {
		s.nSources[src.family()]++
		if int64(src.front) >= int64(len(s.fronts)) {
			return
		}
		f := s.fronts[src.front]
		if f != nil && f.list != nil && familyOf(f.key.Addr) == src.family() && src.prefix == src.prefix.Masked() {
			f.sources = append(f.sources, src.prefix)
			s.sourceUse[src.family()].use(f.tenant, 1)
		}
	})
	for _, f := range s.fronts {
		if f != nil {
			slices.SortFunc(f.sources, netip.Prefix.Compare)
		}
	}
	return err
}

// sources compares sl_src4 and sl_src6.
func (a *mapAudit) sources() {
	s := a.s
	want := map[source]bool{}
	for _, f := range s.fronts {
		if f != nil {
			for _, p := range f.sources {
				want[source{f.number, p}] = true
			}
		}
	}
	var n [families]int
	for src := range want {
		n[src.family()]++
	}
	var surplus []source
	err := s.eachSource(func(src source) {
		if !want[src] {
			surplus = append(surplus, src)
		}
		delete(want, src)
	})
	if err != nil {
		a.errs = append(a.errs, err)
		return
	}
	for _, src := range surplus {
		a.differs(func() error { return s.deleteSource(src) },
			"front %d allows clients in %v, should not", src.front, src.prefix)
	}
	for src := range want {
		a.differs(func() error { return s.insertSource(src) },
			"front %d does not allow clients in %v, should", src.front, src.prefix)
	}
	if a.repair {
		s.nSources = n
	}
}

// MayAsk reports whether a front with source ranges allows a client. The unspecified address represents the node's own
// sockets, which are only allowed by a source range that contains all addresses.
func (m *Maps) MayAsk(front uint32, client netip.Addr) (bool, error) {
	if err := m.gate.RLock(); err != nil {
		return false, err
	}
	defer m.gate.RUnlock()
	bits := client.BitLen()
	if client.IsUnspecified() {
		bits = 0
	}
	src := source{front, netip.PrefixFrom(client, bits)}
	var value uint32
	switch err := m.store.sources[src.family()].Lookup(src.key(), &value); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("map %s: %w", sourceMap[src.family()], err)
	}
	return true, nil
}

// DescribeSource4 describes a key of sl_src4.
func DescribeSource4(k *bpf.MapsSlSrcKey4) string { return source4(k).String() }

// DescribeSource6 describes a key of sl_src6.
func DescribeSource6(k *bpf.MapsSlSrcKey6) string { return source6(k).String() }
