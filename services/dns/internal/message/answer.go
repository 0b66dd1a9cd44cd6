// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"encoding/binary"
	"errors"
	"math"
	"net/netip"
	"time"
)

// maxChain limits the number of CNAME records from the name in the question to an address. Resolvers stop after 8 to
// 17.
const maxChain = 16

// MaxAddresses limits the addresses that are learned from one answer. It equals the limit for one name.
const MaxAddresses = 1024

// Address is an address in an answer.
type Address struct {
	Addr netip.Addr
	// TTL is the lowest TTL of the records from the name in the question to the address.
	TTL time.Duration
}

// Answer is a parsed answer. Reusing it for the next message saves memory.
type Answer struct {
	ID          uint16
	Type, Class uint16 // type and class of the question
	Code        RCode
	Truncated   bool
	// Addresses lists the addresses to learn, each address once. The owner of an address record is the name in the
	// question, or a name that a chain of CNAME records leads to.
	Addresses []Address
	// Ignored is the number of address records that are not used: the owner is not in the chain, the type does not
	// match the question, or there are too many.
	Ignored int

	b     []byte
	name  []byte   // text of the name in the question
	kept  []kept   // address and CNAME records of the answer section
	chain [][2]int // positions of the owner and of the target of the CNAME records of the chain
	index map[netip.Addr]int
}

// kept is a record that may belong to the chain or contain an address to learn.
type kept struct {
	record
	hash uint64 // hash of the owner
}

// Name returns the name in the question, in the same form as Query.Name. The slice is valid until the next Read.
func (a *Answer) Name() []byte { return a.name }

// Links returns the number of CNAME records of the chain.
func (a *Answer) Links() int { return len(a.chain) }

// AppendLink appends the text of the target of a CNAME record of the chain. The message must be unchanged since Read.
func (a *Answer) AppendLink(dst []byte, i int) []byte { return appendName(dst, a.b, a.chain[i][1]) }

// Read parses an answer. Of a truncated answer, it uses the complete records.
//
// Read does not check whether the answer belongs to a query. The caller must compare ID, name, type and class.
func (a *Answer) Read(b []byte) error {
	*a = Answer{
		b: b, name: a.name[:0], kept: a.kept[:0], chain: a.chain[:0], Addresses: a.Addresses[:0], index: a.index,
	}
	if len(b) < headerSize {
		return ErrHeader
	}
	flags := binary.BigEndian.Uint16(b[2:])
	a.ID, a.Code, a.Truncated = binary.BigEndian.Uint16(b), RCode(flags&rcodeMask), flags&flagTC != 0
	if flags&flagQR == 0 {
		return ErrNotAnswer
	}
	if flags&opcodeMask != 0 {
		return ErrOpcode
	}
	if binary.BigEndian.Uint16(b[4:]) != 1 {
		return ErrQuestions
	}
	r := reader{b: b, off: headerSize}
	question := r.name()
	a.Type, a.Class = r.uint16(), r.uint16()
	if r.err != nil {
		return r.err
	}
	a.name = appendName(a.name, b, question)
	if err := a.readRecords(&r); err != nil {
		return err
	}
	if a.Code == NoError && a.Class == ClassIN {
		a.follow(question)
	}
	return nil
}

// readRecords checks all records, and keeps the records of the answer section that may contain an address to learn.
func (a *Answer) readRecords(r *reader) error {
	var e edns
	for section := range 3 {
		for range binary.BigEndian.Uint16(a.b[6+2*section:]) {
			if a.Truncated && r.off == len(a.b) {
				return nil // the server has left out the other records
			}
			rec := r.record()
			if r.err != nil {
				if a.Truncated && errors.Is(r.err, ErrShort) {
					return nil // the message was truncated within this record
				}
				return r.err
			}
			if rec.kind == TypeOPT {
				if section != 2 {
					return ErrEDNS
				}
				if err := e.opt(a.b, rec); err != nil {
					return err
				}
				a.Code |= e.rcode
				continue
			}
			if rec.class != ClassIN {
				continue
			}
			used, ok := a.checkData(rec)
			if !ok {
				return ErrData
			}
			if used && section == 0 {
				a.kept = append(a.kept, kept{record: rec})
			}
		}
	}
	if r.off != len(a.b) {
		return ErrTrailing
	}
	return nil
}

// checkData checks the data of the records that this package uses.
func (a *Answer) checkData(rec record) (used, ok bool) {
	size := rec.end - rec.data
	switch rec.kind {
	case TypeA:
		return true, size == 4
	case TypeAAAA:
		return true, size == 16
	case TypeCNAME:
		end, err := checkName(a.b, rec.data)
		return true, err == nil && end == rec.end
	case TypeSVCB, TypeHTTPS:
		return true, a.checkService(rec)
	}
	return false, true
}

// Keys of the parameters of SVCB and HTTPS records with addresses.
const (
	keyIPv4Hint = 4
	keyIPv6Hint = 6
)

// checkService checks the data of an SVCB or HTTPS record (RFC 9460): a priority, a target, and parameters with
// ascending keys.
func (a *Answer) checkService(rec record) bool {
	if rec.end-rec.data < 3 {
		return false
	}
	// The target must not be compressed (RFC 9460, 2.2). Clients interpret a compressed target differently.
	at, err := checkName(a.b[:rec.end], rec.data+2)
	if err != nil {
		return false
	}
	for i := rec.data + 2; i < at; i += 1 + int(a.b[i]) {
		if a.b[i]&0xc0 != 0 {
			return false
		}
	}
	last := -1
	for at < rec.end {
		key, value, next := a.parameter(at, rec.end)
		if next < 0 || key <= last {
			return false
		}
		if n := len(value); key == keyIPv4Hint && (n == 0 || n%4 != 0) || key == keyIPv6Hint && (n == 0 || n%16 != 0) {
			return false
		}
		last, at = key, next
	}
	return true
}

// parameter returns the parameter at a position. next is negative if the parameter is not complete.
func (a *Answer) parameter(at, end int) (key int, value []byte, next int) {
	if end-at < 4 {
		return 0, nil, -1
	}
	key, n := int(binary.BigEndian.Uint16(a.b[at:])), int(binary.BigEndian.Uint16(a.b[at+2:]))
	at += 4
	if end-at < n {
		return 0, nil, -1
	}
	return key, a.b[at : at+n], at + n
}

// follow determines the chain of CNAME records, and the addresses of the names in it.
func (a *Answer) follow(question int) {
	if len(a.kept) == 0 {
		return
	}
	// Most records have the same owner as the previous record, as a pointer to the same position of the message.
	lastOwner, lastHash := -1, uint64(0)
	for i := range a.kept {
		owner := target(a.b, a.kept[i].owner)
		if owner != lastOwner {
			lastOwner, lastHash = owner, hashName(a.b, owner)
		}
		a.kept[i].owner, a.kept[i].hash = owner, lastHash
	}
	lowest, current := uint32(math.MaxUint32), question
	for {
		hash := hashName(a.b, current)
		var next *kept
		for i := range a.kept {
			k := &a.kept[i]
			if k.hash != hash || !sameName(a.b, k.owner, current) {
				continue
			}
			if k.kind != TypeCNAME {
				a.take(k, lowest)
				k.kind = 0 // taken
			} else if next == nil { // a name must not have several CNAME records; the first one counts
				next = k
			}
		}
		if next == nil || len(a.chain) == maxChain || a.visited(next.data, question) {
			break
		}
		lowest, current = min(lowest, seconds(next.ttl)), next.data
		a.chain = append(a.chain, [2]int{next.owner, next.data})
	}
	for _, k := range a.kept {
		if k.kind != 0 && k.kind != TypeCNAME {
			a.Ignored++
		}
	}
}

// target returns the position to which a name points that consists only of a pointer. Owners can then be compared by
// position.
func target(b []byte, at int) int {
	for range maxPointers {
		if b[at]&0xc0 != 0xc0 {
			break
		}
		at = pointer(b, at)
	}
	return at
}

// visited reports whether a name is in the chain already.
func (a *Answer) visited(name, question int) bool {
	if sameName(a.b, name, question) {
		return true
	}
	for _, link := range a.chain {
		if sameName(a.b, name, link[1]) {
			return true
		}
	}
	return false
}

// take adds the addresses of a record. lowest is the lowest TTL of the chain so far.
func (a *Answer) take(k *kept, lowest uint32) {
	ttl := min(lowest, seconds(k.ttl))
	hosts := a.Type == TypeA || a.Type == TypeAAAA || a.Type == TypeANY
	services := a.Type == TypeSVCB || a.Type == TypeHTTPS
	data := a.b[k.data:k.end]
	switch {
	case k.kind == TypeA && (hosts || services):
		a.add(netip.AddrFrom4([4]byte(data)), ttl)
	case k.kind == TypeAAAA && (hosts || services):
		a.add(netip.AddrFrom16([16]byte(data)).Unmap(), ttl)
	case (k.kind == TypeSVCB || k.kind == TypeHTTPS) && (services || a.Type == TypeANY):
		// A record in alias mode (priority 0) has no hints of its own, because clients query its target.
		if binary.BigEndian.Uint16(data) == 0 {
			return
		}
		a.hints(k, ttl)
	default:
		a.Ignored++
	}
}

func (a *Answer) hints(k *kept, ttl uint32) {
	at, err := checkName(a.b, k.data+2)
	for err == nil && at < k.end {
		key, value, next := a.parameter(at, k.end)
		if next < 0 {
			return // not reached, because the record was checked before
		}
		switch key {
		case keyIPv4Hint:
			for ; len(value) >= 4; value = value[4:] {
				a.add(netip.AddrFrom4([4]byte(value)), ttl)
			}
		case keyIPv6Hint:
			for ; len(value) >= 16; value = value[16:] {
				a.add(netip.AddrFrom16([16]byte(value)).Unmap(), ttl)
			}
		}
		at = next
	}
}

// manyAddresses is the number of addresses above which a map is used to find duplicates.
const manyAddresses = 32

// add adds an address. An address that occurs twice gets the lower TTL.
func (a *Answer) add(addr netip.Addr, ttl uint32) {
	d := time.Duration(ttl) * time.Second
	if i := a.find(addr); i >= 0 {
		a.Addresses[i].TTL = min(a.Addresses[i].TTL, d)
		return
	}
	if len(a.Addresses) >= MaxAddresses {
		a.Ignored++
		return
	}
	a.Addresses = append(a.Addresses, Address{Addr: addr, TTL: d})
	if n := len(a.Addresses); n > manyAddresses {
		a.index[addr] = n - 1
	}
}

func (a *Answer) find(addr netip.Addr) int {
	n := len(a.Addresses)
	if n < manyAddresses {
		for i := range a.Addresses {
			if a.Addresses[i].Addr == addr {
				return i
			}
		}
		return -1
	}
	if n == manyAddresses { // from the next address on, the map is used
		if a.index == nil {
			a.index = make(map[netip.Addr]int)
		}
		clear(a.index)
		for i := range a.Addresses {
			a.index[a.Addresses[i].Addr] = i
		}
	}
	if i, ok := a.index[addr]; ok {
		return i
	}
	return -1
}

// seconds returns the value of a TTL. A TTL with the highest bit set counts as 0 (RFC 2181, 8).
func seconds(ttl uint32) uint32 {
	if ttl > math.MaxInt32 {
		return 0
	}
	return ttl
}
