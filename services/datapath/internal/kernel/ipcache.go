// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// IPInfo is what the ipcache knows about a prefix.
type IPInfo struct {
	Identity identity.Numeric
	// Node is the number of the node that holds the prefix, 0 for this node or
	// none.
	Node uint16
	// Flags say what kind of prefix it is.
	Flags IPFlags
}

// IPFlags describe an ipcache entry.
type IPFlags uint16

// FlagPodRange marks a range of which every address in use has an endpoint on
// this node: what has none is dropped with the reason no-route.
const FlagPodRange IPFlags = 1

// IPEntry is one entry of the ipcache.
type IPEntry struct {
	Prefix netip.Prefix
	IPInfo
}

// UpsertIP sets what is known about a prefix: the longest matching prefix
// counts. The entries of endpoints, of host addresses and of the node's pod
// ranges are kept by Publish, SyncHostAddrs and Open.
func (k *Kernel) UpsertIP(p netip.Prefix, i IPInfo) error {
	if err := errors.Join(checkPrefix(p), checkIdentity(i.Identity)); err != nil {
		return err
	}
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	if err := k.putIP(p, i); err != nil {
		return fmt.Errorf("ipcache of %v: %w", p, err)
	}
	return nil
}

// DeleteIP removes a prefix from the ipcache. A prefix that is not there is
// not an error.
func (k *Kernel) DeleteIP(p netip.Prefix) error {
	if err := checkPrefix(p); err != nil {
		return err
	}
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	if err := k.dropIP(p); err != nil {
		return fmt.Errorf("ipcache of %v: %w", p, err)
	}
	return nil
}

// IPCache lists the ipcache, sorted by prefix, IPv4 first.
func (k *Kernel) IPCache() ([]IPEntry, error) {
	if err := k.rlock(); err != nil {
		return nil, err
	}
	defer k.mu.RUnlock()
	return k.ipcache()
}

func (k *Kernel) ipcache() ([]IPEntry, error) {
	var es []IPEntry
	var v bpf.MapsSlIpcache

	var k4 bpf.MapsSlPrefix4
	it := k.Pins.Map(bpf.MapsMapSlIpc4).Iterate()
	for it.Next(&k4, &v) {
		es = append(es, IPEntry{netip.PrefixFrom(netip.AddrFrom4(k4.Addr), int(k4.Bits)), infoOf(v)})
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list the IPv4 ipcache: %w", err)
	}
	var k6 bpf.MapsSlPrefix6
	it = k.Pins.Map(bpf.MapsMapSlIpc6).Iterate()
	for it.Next(&k6, &v) {
		es = append(es, IPEntry{netip.PrefixFrom(netip.AddrFrom16(k6.Addr), int(k6.Bits)), infoOf(v)})
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list the IPv6 ipcache: %w", err)
	}
	slices.SortFunc(es, func(a, b IPEntry) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return es, nil
}

func infoOf(v bpf.MapsSlIpcache) IPInfo {
	return IPInfo{Identity: identity.Numeric(v.Identity), Node: v.Node, Flags: IPFlags(v.Flags)}
}

func checkPrefix(p netip.Prefix) error {
	if !p.IsValid() || p.Addr().Is4In6() || p != p.Masked() {
		return fmt.Errorf("%w: %v is not a masked prefix", pin.ErrInvalid, p)
	}
	return nil
}

// hostPrefix is the prefix that holds a alone.
func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func (k *Kernel) trie(p netip.Prefix) (*ebpf.Map, any) {
	if p.Addr().Is4() {
		return k.Pins.Map(bpf.MapsMapSlIpc4), &bpf.MapsSlPrefix4{Bits: uint32(p.Bits()), Addr: p.Addr().As4()}
	}
	return k.Pins.Map(bpf.MapsMapSlIpc6), &bpf.MapsSlPrefix6{Bits: uint32(p.Bits()), Addr: p.Addr().As16()}
}

func (k *Kernel) putIP(p netip.Prefix, i IPInfo) error {
	m, key := k.trie(p)
	return pin.ReplaceInTrie(m, key, &bpf.MapsSlIpcache{
		Identity: uint32(i.Identity), Node: i.Node, Flags: uint16(i.Flags),
	})
}

func (k *Kernel) dropIP(p netip.Prefix) error {
	m, key := k.trie(p)
	return pin.DeleteKey(m, key)
}

// getIP returns what the longest match of a host prefix says.
func (k *Kernel) getIP(p netip.Prefix) (IPInfo, bool, error) {
	m, key := k.trie(p)
	var v bpf.MapsSlIpcache
	switch err := m.Lookup(key, &v); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return IPInfo{}, false, nil
	case err != nil:
		return IPInfo{}, false, err
	}
	return infoOf(v), true, nil
}

// syncPodRanges makes the node's pod ranges unknown-in-cluster, so that an
// address without an endpoint is never taken for the world, and removes the
// ranges of an earlier configuration.
func (k *Kernel) syncPodRanges(ranges []netip.Prefix) error {
	have, err := k.ipcache()
	if err != nil {
		return err
	}
	want := IPInfo{Identity: identity.UnknownInCluster, Flags: FlagPodRange}
	for _, p := range ranges {
		if err := k.putIP(p, want); err != nil {
			return fmt.Errorf("%v: %w", p, err)
		}
	}
	for _, e := range have {
		if e.Flags&FlagPodRange != 0 && !slices.Contains(ranges, e.Prefix) {
			k.log.Info("earlier pod range removed", "prefix", e.Prefix)
			if err := k.dropIP(e.Prefix); err != nil {
				return fmt.Errorf("%v: %w", e.Prefix, err)
			}
		}
	}
	return nil
}
