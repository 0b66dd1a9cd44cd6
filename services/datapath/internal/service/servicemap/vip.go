// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/frontend"
)

// keyOfAddress returns the key of a virtual IP: see package vip.
func keyOfAddress(addr netip.Addr) frontend.Key { return frontend.Key{Addr: addr} }

func isAddressKey(k frontend.Key) bool { return k.Port == 0 && k.Protocol == 0 && !k.Node }

// isAddress reports whether the key is the key of an address.
func (k rawKey) isAddress() bool { return isAddressKey(k.frontend()) && rawKeyOf(k.frontend()) == k }

// settleAddresses inserts and deletes keys of addresses whose claims have changed. It returns an error if the kernel
// lacks memory for a key; an audit with repair retries that.
func (a *application) settleAddresses() {
	s := a.s
	insert, remove := s.addresses.Changed()
	for _, addr := range remove {
		if err := s.deleteKey(rawKeyOf(keyOfAddress(addr))); err != nil {
			a.errs = append(a.errs, fmt.Errorf("remove the address %v: %w", addr, err))
			continue
		}
		s.addresses.Removed(addr)
		s.nKeys[familyOf(addr)]--
	}
	var missing [families][]numbered
	for _, addr := range insert {
		missing[familyOf(addr)] = append(missing[familyOf(addr)], numbered{key: keyOfAddress(addr)})
	}
	for fam, ns := range missing {
		s.insertEach(fam, ns, func(i int, err error) {
			if err != nil {
				a.errs = append(a.errs, fmt.Errorf("address %v: %w", ns[i].key.Addr, err))
				return
			}
			s.addresses.Written(ns[i].key.Addr)
			s.nKeys[fam]++
		})
	}
}

// IsOfServices reports whether an address is a virtual IP according to the maps: connections to its ports without a
// frontend are refused.
func (m *Maps) IsOfServices(addr netip.Addr) (bool, error) {
	if err := m.gate.RLock(); err != nil {
		return false, err
	}
	defer m.gate.RUnlock()
	_, err := m.store.lookupKey(keyOfAddress(addr))
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return err == nil, err
}
