// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// Records are small and written often, so they have a compact binary layout. Each begins with the version of its
// layout. It is independent of the version of the schema, because a later schema may still use this layout.
//
//	allocation   key    container id, 0, interface name
//	             value  1, state, expiry (8 bytes), then per address: length (4 or 16), pool prefix length, address;
//	                    with a manager then: 0, its length, its name
//	quarantined      key    address (4 or 16 bytes)
//	             value  1, until (8 bytes)
//	cursor       key    address of the range (4 or 16 bytes), prefix length
//	             value  1, address
//	serving      key    place in the order of use (1 byte)
//	             value  1, address of the range (4 or 16 bytes), prefix length
//	primary      as serving
//	refused      key    place in the list (1 byte)
//	             value  1, length of what follows (1 byte), address of the range, prefix length, reason; for a
//	                    range that the node keeps, 0 behind the reason
//
// Times are nanoseconds of the wall clock since 1970, big-endian; 0 is the zero time.
const recordVersion = 1

var errRecord = errors.New("not a record of this program")

func ownerKey(o workload.Owner) []byte {
	return append(append([]byte(o.ContainerID), 0), o.Interface...)
}

func parseOwnerKey(key []byte) (workload.Owner, error) {
	id, name, ok := bytes.Cut(key, []byte{0})
	o := workload.Owner{ContainerID: string(id), Interface: string(name)}
	if !ok {
		return o, fmt.Errorf("%w: the key has no interface name", errRecord)
	}
	if err := o.Check(); err != nil {
		return o, fmt.Errorf("%w: %w", errRecord, err)
	}
	return o, nil
}

func putTime(b []byte, t time.Time) []byte {
	var n int64
	if !t.IsZero() {
		n = t.UnixNano()
	}
	return binary.BigEndian.AppendUint64(b, uint64(n))
}

// parseTime decodes the first eight bytes.
func parseTime(b []byte) time.Time {
	n := int64(binary.BigEndian.Uint64(b))
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

func encodeAllocation(a *ipam.Allocation) []byte {
	b := make([]byte, 0, 64)
	b = append(b, recordVersion, byte(a.State))
	b = putTime(b, a.Expires)
	for _, x := range a.Addresses {
		raw := x.Addr.AsSlice()
		b = append(b, byte(len(raw)), byte(x.PoolBits))
		b = append(b, raw...)
	}
	if a.Manager != "" {
		b = append(append(b, 0, byte(len(a.Manager))), a.Manager...)
	}
	return b
}

func decodeAllocation(key, value []byte) (*ipam.Allocation, error) {
	o, err := parseOwnerKey(key)
	if err != nil {
		return nil, err
	}
	if len(value) < 10 || value[0] != recordVersion {
		return nil, fmt.Errorf("%w: the allocation of %s has %d bytes or an unknown layout", errRecord, o, len(value))
	}
	a := &ipam.Allocation{Owner: o, State: ipam.State(value[1]), Expires: parseTime(value[2:])}
	if a.State != ipam.Leased && a.State != ipam.Confirmed || (a.State == ipam.Leased) == a.Expires.IsZero() {
		return nil, fmt.Errorf("%w: the allocation of %s has state %d and expiry %v", errRecord, o, value[1], a.Expires)
	}
	for rest := value[10:]; len(rest) > 0; {
		if n := len(rest) - 2; rest[0] == 0 && n > 0 && n == int(rest[1]) {
			a.Manager = string(rest[2:])
			break
		}
		if len(rest) < 2 || len(rest) < 2+int(rest[0]) {
			return nil, fmt.Errorf("%w: the allocation of %s ends early", errRecord, o)
		}
		addr, ok := parseAddr(rest[2 : 2+int(rest[0])])
		x := ipam.Address{Addr: addr, PoolBits: int(rest[1])}
		n := len(a.Addresses)
		if !ok || x.PoolBits > addr.BitLen() || n > 1 || n == 1 && !(a.Addresses[0].Addr.Is4() && addr.Is6()) {
			return nil, fmt.Errorf("%w: the allocation of %s has a bad address", errRecord, o)
		}
		a.Addresses = append(a.Addresses, x)
		rest = rest[2+int(rest[0]):]
	}
	if len(a.Addresses) == 0 {
		return nil, fmt.Errorf("%w: the allocation of %s has no address", errRecord, o)
	}
	return a, nil
}

func parseAddr(b []byte) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(b)
	return a, ok && !a.Is4In6()
}

func encodeQuarantined(until time.Time) []byte { return putTime([]byte{recordVersion}, until) }

func decodeQuarantined(key, value []byte) (ipam.Quarantined, error) {
	a, ok := parseAddr(key)
	if !ok || len(value) != 9 || value[0] != recordVersion {
		return ipam.Quarantined{}, fmt.Errorf("%w: the quarantine of address %x", errRecord, key)
	}
	return ipam.Quarantined{Addr: a, Until: parseTime(value[1:])}, nil
}

func cursorKey(p netip.Prefix) []byte { return append(p.Addr().AsSlice(), byte(p.Bits())) }

func encodeCursor(at netip.Addr) []byte { return append([]byte{recordVersion}, at.AsSlice()...) }

func decodeCursor(key, value []byte) (netip.Prefix, netip.Addr, error) {
	bad := fmt.Errorf("%w: the cursor of range %x", errRecord, key)
	if len(key) < 1 || len(value) < 1 || value[0] != recordVersion {
		return netip.Prefix{}, netip.Addr{}, bad
	}
	p, ok := parsePrefix(key)
	at, ok2 := parseAddr(value[1:])
	if !ok || !ok2 || !p.Contains(at) {
		return netip.Prefix{}, netip.Addr{}, bad
	}
	return p, at, nil
}

func parsePrefix(b []byte) (netip.Prefix, bool) {
	base, ok := parseAddr(b[:len(b)-1])
	p := netip.PrefixFrom(base, int(b[len(b)-1]))
	return p, ok && p.IsValid() && p == p.Masked()
}

func encodeServing(p netip.Prefix) []byte { return append([]byte{recordVersion}, cursorKey(p)...) }

func decodeServing(key, value []byte) (netip.Prefix, error) {
	if len(key) == 1 && len(value) > 1 && value[0] == recordVersion {
		if p, ok := parsePrefix(value[1:]); ok {
			return p, nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("%w: the serving range %x", errRecord, key)
}

func encodeRefused(r ipam.Refusal) []byte {
	key := cursorKey(r.Prefix)
	b := append(append([]byte{recordVersion, byte(len(key))}, key...), r.Reason...)
	if r.Kept {
		b = append(b, 0)
	}
	return b
}

func decodeRefused(key, value []byte) (ipam.Refusal, error) {
	if len(key) == 1 && len(value) > 2 && value[0] == recordVersion && value[1] > 0 && len(value) >= 2+int(value[1]) {
		at := 2 + int(value[1])
		if p, ok := parsePrefix(value[2:at]); ok {
			reason, kept := strings.CutSuffix(string(value[at:]), "\x00")
			return ipam.Refusal{Prefix: p, Reason: reason, Kept: kept}, nil
		}
	}
	return ipam.Refusal{}, fmt.Errorf("%w: the refused range %x", errRecord, key)
}
