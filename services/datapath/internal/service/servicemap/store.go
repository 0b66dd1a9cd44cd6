// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/idalloc"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap/vip"
)

// store knows what is in the maps of services and what is free. It is guarded by
// the gate of Maps.
//
// What is free is zero in the maps, but for the generation of a backend.
type store struct {
	rawMaps

	entries map[frontend.Key]*entry
	nKeys   [families]int // of them in the maps, with those of addresses
	pending [families]int // keys that the transaction under way will insert
	fronts  []*front      // by number, nil: free

	addresses vip.Addresses
	// closed are new frontends without room, whose addresses only Services use. They have no
	// entry: the key of the address makes programs refuse connections.
	closed    map[frontend.Key]struct{}
	nSources  [families]int // of all fronts
	sourceUse [families]sourceUse

	frontNumbers   idalloc.Numbers
	backendNumbers [families]idalloc.Numbers
	members        idalloc.Runs
	groupNumbers   idalloc.Numbers

	backends [families]map[netip.AddrPort]*backend
	gens     [families][]uint8 // of backends, by number
	lists    map[uint64][]*list
	tables   [rendezvous.MaxBits + 1]int // lists with a table of so many bits
	empty    *list                       // without backends; it takes no place

	groups    map[string]uint16 // by service port, of those known
	named     map[uint16]string // the reverse
	groupUses map[uint16]int    // entries that have it

	// adopted are backends that no list has and that an earlier process may have
	// drained: the first transaction that is not partial says which of them are drained
	// still. nil since.
	adopted []*backend

	// left is what the next grace period lets rest, resting what waits for its
	// last users after one.
	left    *departed
	leaving []*departed // of grace periods that are under way
	resting []*rest
	removed [kinds]removed // numbers that left and are not free yet
	short   bool           // a frontend was refused while some of them were not free
}

// entry is a frontend as it is in the maps.
type entry struct {
	key     frontend.Key
	service string        // empty: adopted, and not named since
	kind    frontend.Kind // 0: likewise
	tenant  shares.Tenant // zero: it is unknown
	inside  *front        // nil: there is none
	outside *front        // may be inside

	timeout uint32
	group   uint16
	claim   vip.Claim
	// refused: there was no room for it when it was new. It has no backends, and nothing of the
	// reserve is for it. An adopted entry without backends may be such a one until it is set.
	refused bool
}

// front is an element of sl_front that is in use, or rests.
type front struct {
	number uint32
	key    frontend.Key
	list   *list // nil: no key leads to the front, it was removed
	// draining are the backends that keep the connections which the front has led to
	// them, by address. Only sockets name them by the front, no map does.
	draining []*backend
	flags    uint16
	// sources are the prefixes from which the front may be asked if it has flagSources,
	// sorted.
	sources []netip.Prefix
	// timeout and group are those of the entry.
	timeout uint32
	group   uint16
	tenant  shares.Tenant // of the Service
}

// list is a run of members that fronts share, with the slots of its table behind them.
type list struct {
	family   int
	span     idalloc.Run
	backends []*backend
	table    *rendezvous.Table // nil: there is none
	sum      uint64
	fronts   int // that have it
}

// backend is an element of sl_be4 or sl_be6 that is in use, or rests.
type backend struct {
	family int
	number uint32
	addr   netip.AddrPort
	salt   uint32 // of addr
	gen    uint8
	gone   bool
	lists  int           // that have it
	drains int           // fronts that drain it
	tenant shares.Tenant // of the Service that had it first
	left   *departed     // that it is gone in
}

// used says whether a list leads to the backend, or a front drains it.
func (b *backend) used() bool { return b.lists > 0 || b.drains > 0 }

// departed is what one grace period is for.
type departed struct {
	spans    []idalloc.Run
	fronts   []*front
	backends []*backend
}

func (d *departed) empty() bool {
	return len(d.spans) == 0 && len(d.fronts) == 0 && len(d.backends) == 0
}

// rest is a number that waits for its last users.
type rest struct {
	since   time.Time
	front   *front // nil: it is a backend
	backend *backend
	left    *departed // in which the backend was gone; another since: it is in use, or left again
}

func newStore(rm rawMaps) *store {
	s := &store{
		rawMaps:      rm,
		entries:      map[frontend.Key]*entry{},
		closed:       map[frontend.Key]struct{}{},
		fronts:       make([]*front, rm.nFronts),
		frontNumbers: idalloc.NewNumbers(rm.nFronts - 1),
		members:      idalloc.NewRuns(rm.nMembers),
		groupNumbers: idalloc.NewNumbers(1<<16 - 1),
		lists:        map[uint64][]*list{},
		empty:        &list{},
		groups:       map[string]uint16{},
		named:        map[uint16]string{},
		groupUses:    map[uint16]int{},
		left:         &departed{},
	}
	for k := range s.removed {
		s.removed[k].of = map[shares.Tenant]int{}
	}
	for fam := range families {
		s.sourceUse[fam] = sourceUse{shares.Held{Size: int(rm.sources[fam].MaxEntries())}, map[shares.Tenant]int{}}
		s.backends[fam] = map[netip.AddrPort]*backend{}
		s.backendNumbers[fam] = idalloc.NewNumbers(rm.nBackends - 1)
		s.gens[fam] = make([]uint8, rm.nBackends)
	}
	return s
}

// Salt is what chooses among backends besides the client: 32-bit FNV-1a of the
// four or sixteen bytes of the address and the two of the port, both in network
// order, mixed by the last steps of MurmurHash3. It is the same on every node and
// after every start.
func Salt(b netip.AddrPort) uint32 {
	const prime = 16777619
	h := uint32(2166136261)
	if b.Addr().Is4() {
		for _, c := range b.Addr().As4() {
			h = (h ^ uint32(c)) * prime
		}
	} else {
		for _, c := range b.Addr().As16() {
			h = (h ^ uint32(c)) * prime
		}
	}
	h = (h ^ uint32(b.Port()>>8)) * prime
	h = (h ^ uint32(b.Port()&0xff)) * prime
	h = (h ^ h>>16) * 0x85ebca6b
	h = (h ^ h>>13) * 0xc2b2ae35
	return h ^ h>>16
}

func memberWord(b *backend) uint64 { return uint64(b.number) | uint64(b.salt)<<32 }

// sumOf adds a backend, by its salt, to the sum of those before it.
func sumOf(sum uint64, salt uint32) uint64 { return sum*0x9e3779b97f4a7c15 + uint64(salt) + 1 }

// The flags of a front: SL_FRONT_... of service_abi.h.
const (
	flagDrop    = 0x1
	flagSources = 0x2
	flagGone    = 0x4

	countShift = 24
	tableShift = 40
	flagsShift = 48
	baseMask   = 1<<countShift - 1
	maxCount   = 1<<16 - 1
	tableMask  = 1<<8 - 1
)

// run is the members and the slots that a front's word leads to.
func run(listWord uint64) (base, members, tableBits int) {
	return int(listWord & baseMask), int(listWord >> countShift & maxCount), int(listWord >> tableShift & tableMask)
}

// element is what an element of the list's run is. What follows the table is not used.
func (l *list) element(i int) uint64 {
	if n := len(l.backends); i >= n {
		owners := l.table.Owners()
		if i -= n; i >= len(owners) {
			return 0
		}
		i = int(owners[i])
	}
	return memberWord(l.backends[i])
}

// listWord is the word that leads from a front to its members.
func (f *front) listWord() uint64 {
	w := uint64(f.flags) << flagsShift
	if f.list != nil {
		w |= uint64(f.list.span.Base) | uint64(len(f.list.backends))<<countShift | uint64(f.list.table.Bits())<<tableShift
	}
	return w
}

// groupWord is the word of timeout, group and port.
func (f *front) groupWord() uint64 {
	return uint64(f.timeout) | uint64(f.group)<<32 | uint64(f.key.Port)<<48
}

// addrWords is the address of the frontend, as the programs give it back.
func addrWords(k frontend.Key) [2]uint64 {
	var b [16]byte
	if k.Addr.Is4() {
		four := k.Addr.As4()
		copy(b[:], four[:])
	} else {
		b = k.Addr.As16()
	}
	return words16(b)
}

// packed returns the front as the map has it.
func (f *front) packed() frontWords {
	a := addrWords(f.key)
	return frontWords{listWord: f.listWord(), groupWord: f.groupWord(), addrWord: a[0], addrWord + 1: a[1]}
}

// raw is the backend as the map has it.
func (b *backend) raw() rawBackend {
	r := rawBackend{addr: b.addr.Addr(), port: b.addr.Port(), state: backendActive, gen: b.gen}
	if b.gone {
		r.state = backendGone
	}
	return r
}

// fe is the value of the entry's key.
func (e *entry) fe() bpf.MapsSlFe {
	var v bpf.MapsSlFe
	if e.inside != nil {
		v.Inside = e.inside.number
	}
	if e.outside != nil {
		v.Outside = e.outside.number
	}
	return v
}

// each calls f for the fronts of the entry, each once.
func (e *entry) each(f func(*front)) {
	if e.inside != nil {
		f(e.inside)
	}
	if e.outside != nil && e.outside != e.inside {
		f(e.outside)
	}
}

// find returns a list of just these backends, with a table if it should have one; nil:
// there is none.
func (s *store) find(fam int, want *frontend.List) *list {
	bs := want.Backends
	if len(bs) == 0 {
		return s.empty
	}
	var sum uint64
	for i := range bs {
		sum = sumOf(sum, Salt(bs[i].AddrPort))
	}
	for _, l := range s.lists[sum] {
		if l.family == fam && l.is(want) {
			return l
		}
	}
	return nil
}

// wantedTable is the size of the table that a list should have, 0: none.
func wantedTable(want *frontend.List) int {
	if !want.Table {
		return 0
	}
	return rendezvous.Bits(len(want.Backends))
}

// is says whether the list is what another one asks for.
func (l *list) is(want *frontend.List) bool {
	bs := want.Backends
	if l == nil || len(l.backends) != len(bs) || l.table.Bits() != wantedTable(want) {
		return false
	}
	for i, b := range l.backends {
		if b.addr != bs[i].AddrPort {
			return false
		}
	}
	return true
}

// known are those of some backends, sorted by address, that the maps have and that
// were not removed: no socket was led to any other.
func (s *store) known(fam int, some []frontend.Backend) (bs []*backend) {
	for _, x := range some {
		if b := s.backends[fam][x.AddrPort]; b != nil && !b.gone {
			bs = append(bs, b)
		}
	}
	return bs
}

// keep lists a list that is in the maps, with its backends.
func (s *store) keep(l *list) {
	l.sum = 0
	for _, b := range l.backends {
		l.sum = sumOf(l.sum, b.salt)
		b.lists++
	}
	s.lists[l.sum] = append(s.lists[l.sum], l)
	s.tables[l.table.Bits()]++
}

// forget is the reverse of keep. It returns the backends that no list has now.
func (s *store) forget(l *list) (lost []*backend) {
	others := s.lists[l.sum]
	for i, o := range others {
		if o == l {
			others[i] = others[len(others)-1]
			others = others[:len(others)-1]
			break
		}
	}
	if len(others) == 0 {
		delete(s.lists, l.sum)
	} else {
		s.lists[l.sum] = others
	}
	s.tables[l.table.Bits()]--
	for _, b := range l.backends {
		if b.lists--; b.lists == 0 {
			lost = append(lost, b)
		}
	}
	return lost
}

// addresses are those of the list's backends.
func (l *list) addresses() []netip.AddrPort {
	as := make([]netip.AddrPort, len(l.backends))
	for i, b := range l.backends {
		as[i] = b.addr
	}
	return as
}

// runLength is how long the run of a list is. With a table, it has room for as many members
// as the table can have backends, whatever their number: the run of another table of that
// size fits where one was.
func runLength(members, tableBits int) int {
	if slots := rendezvous.Slots(tableBits); slots > 0 {
		return slots + slots/rendezvous.LeastSlots
	}
	return members
}

// quarter is what one list may have of a map.
func quarter(size int) int { return size / 4 }

// reserve is kept free for changes of frontends that are there.
func reserve(size int) int { return (size + 9) / 10 }

// reservedMembers are kept free for changes of frontends that are there: as reserve, and
// as many as a table takes that is exchanged for the largest one.
func (s *store) reservedMembers(tableBits int) int {
	return max(reserve(s.nMembers), s.longest(tableBits))
}

// longest is the length of the longest run with a table, among those that are there and
// one of so many bits; 0: there is none.
func (s *store) longest(tableBits int) int {
	for bits := len(s.tables) - 1; bits > tableBits; bits-- {
		if s.tables[bits] > 0 {
			return runLength(0, bits)
		}
	}
	return runLength(0, tableBits)
}
