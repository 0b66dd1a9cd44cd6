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

// store mirrors the content of the maps of services and which elements are free. It is guarded by the gate of Maps.
// Free elements are zero in the maps, except for the generation of a backend.
type store struct {
	rawMaps

	entries map[frontend.Key]*entry
	nKeys   [families]int // keys in the maps, including keys of addresses
	pending [families]int // keys that the current transaction will insert
	fronts  []*front      // by ID; nil: free

	addresses vip.Addresses
	// closed are new frontends that did not fit and whose addresses only Services use. They have no entry: the key of the
	// address makes programs refuse connections.
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
	tables   [rendezvous.MaxBits + 1]int // number of lists by table size in bits
	empty    *list                       // without backends; it uses no elements

	groups    map[string]uint16 // by service port, if known
	named     map[uint16]string // the reverse
	groupUses map[uint16]int    // number of entries by group

	// adopted are backends in no list that a previous process may have drained. The first transaction that is not partial
	// decides which of them still drain. Then it is nil.
	adopted []*backend

	// left contains what was removed since the last grace period began. When its own ends, members of lists are free,
	// and IDs of lists and backends go to resting, the quarantine, until Collect finds no reference to them.
	left    *departed
	leaving []*departed // elements of grace periods in progress
	resting []*rest
	removed [kinds]removed // removed IDs that are not free yet
	short   bool           // a frontend was refused while some of them were not free
}

// entry is a frontend in the maps.
type entry struct {
	key     frontend.Key
	service string        // empty: adopted and not confirmed
	kind    frontend.Kind // 0: likewise
	tenant  shares.Tenant // zero: unknown
	inside  *front        // nil: none
	outside *front        // may be the same as inside

	timeout uint32
	group   uint16
	claim   vip.Claim
	// refused: it did not fit when it was new. It has no backends, and must not use the reserve. An adopted entry without
	// backends counts as refused until it is set.
	refused bool
}

// front is an element of sl_front that is in use or in quarantine.
type front struct {
	number uint32
	key    frontend.Key
	list   *list // nil: the front was removed, no key refers to it
	// draining are the backends that keep existing connections of the front, by address. Only sockets refer to them, no
	// map does.
	draining []*backend
	flags    uint16
	// sources are the source ranges of the front, sorted; used with flagSources.
	sources []netip.Prefix
	// timeout and group are the same as in the entry.
	timeout uint32
	group   uint16
	tenant  shares.Tenant // of the Service
}

// list is a run of members that fronts share, followed by the slots of its table.
type list struct {
	family   int
	span     idalloc.Run
	backends []*backend
	table    *rendezvous.Table // nil: none
	sum      uint64
	fronts   int // number of fronts with this list
}

// backend is an element of sl_be4 or sl_be6 that is in use or in quarantine.
type backend struct {
	family int
	number uint32
	addr   netip.AddrPort
	salt   uint32 // of addr
	gen    uint8
	gone   bool
	lists  int           // number of lists with it
	drains int           // number of fronts that drain it
	tenant shares.Tenant // of the first Service with it
	left   *departed     // set in which it was removed
}

// used reports whether a list contains the backend, or a front drains it.
func (b *backend) used() bool { return b.lists > 0 || b.drains > 0 }

// departed are the elements that one grace period covers.
type departed struct {
	spans    []idalloc.Run
	fronts   []*front
	backends []*backend
}

func (d *departed) empty() bool {
	return len(d.spans) == 0 && len(d.fronts) == 0 && len(d.backends) == 0
}

// rest is an ID in quarantine.
type rest struct {
	since   time.Time
	front   *front // nil: a backend
	backend *backend
	// left is the set in which the backend was removed. If it differs from backend.left, the backend is in use or was
	// removed again.
	left *departed
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

// Salt returns the value by which a backend is ranked in rendezvous hashing: 32-bit FNV-1a of the four or sixteen bytes
// of the address and the two bytes of the port, in network order, finished by the last steps of MurmurHash3. It is the
// same on every node and after every restart.
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

// sumOf adds a backend's salt to the hash of a list.
func sumOf(sum uint64, salt uint32) uint64 { return sum*0x9e3779b97f4a7c15 + uint64(salt) + 1 }

// Flags of a front: SL_FRONT_... of service_abi.h.
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

// run decodes the members and table size in a front's packed entry.
func run(listWord uint64) (base, members, tableBits int) {
	return int(listWord & baseMask), int(listWord >> countShift & maxCount), int(listWord >> tableShift & tableMask)
}

// element returns the value of the i-th element of the list's run. Elements after the table are unused.
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

// listWord returns the packed entry with flags, members and table.
func (f *front) listWord() uint64 {
	w := uint64(f.flags) << flagsShift
	if f.list != nil {
		w |= uint64(f.list.span.Base) | uint64(len(f.list.backends))<<countShift | uint64(f.list.table.Bits())<<tableShift
	}
	return w
}

// groupWord returns the packed entry with timeout, group and port.
func (f *front) groupWord() uint64 {
	return uint64(f.timeout) | uint64(f.group)<<32 | uint64(f.key.Port)<<48
}

// addrWords returns the frontend's address, which the programs write into replies.
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

// packed returns the front in the format of the map.
func (f *front) packed() frontWords {
	a := addrWords(f.key)
	return frontWords{listWord: f.listWord(), groupWord: f.groupWord(), addrWord: a[0], addrWord + 1: a[1]}
}

// raw returns the backend in the format of the map.
func (b *backend) raw() rawBackend {
	r := rawBackend{addr: b.addr.Addr(), port: b.addr.Port(), state: backendActive, gen: b.gen}
	if b.gone {
		r.state = backendGone
	}
	return r
}

// fe returns the value of the entry's key.
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

// each calls f once for each front of the entry.
func (e *entry) each(f func(*front)) {
	if e.inside != nil {
		f(e.inside)
	}
	if e.outside != nil && e.outside != e.inside {
		f(e.outside)
	}
}

// find returns a list with exactly these backends, and with a table if wanted; nil: none.
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

// wantedTable returns the size of the table that a list needs, as rendezvous.Bits does; 0: no table.
func wantedTable(want *frontend.List) int {
	if !want.Table {
		return 0
	}
	return rendezvous.Bits(len(want.Backends))
}

// is reports whether the list equals the wanted one.
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

// known returns the given backends, sorted by address, that are in the maps and not removed. Sockets can only
// use these.
func (s *store) known(fam int, some []frontend.Backend) (bs []*backend) {
	for _, x := range some {
		if b := s.backends[fam][x.AddrPort]; b != nil && !b.gone {
			bs = append(bs, b)
		}
	}
	return bs
}

// keep registers a list that is in the maps, with its backends.
func (s *store) keep(l *list) {
	l.sum = 0
	for _, b := range l.backends {
		l.sum = sumOf(l.sum, b.salt)
		b.lists++
	}
	s.lists[l.sum] = append(s.lists[l.sum], l)
	s.tables[l.table.Bits()]++
}

// forget reverts keep. It returns the backends that are now in no list.
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

// addresses returns the addresses of the list's backends.
func (l *list) addresses() []netip.AddrPort {
	as := make([]netip.AddrPort, len(l.backends))
	for i, b := range l.backends {
		as[i] = b.addr
	}
	return as
}

// runLength returns the length of a list's run. With a table, it has space for the maximum number of backends of the
// table, so that another table of the same size fits into the same run.
func runLength(members, tableBits int) int {
	if slots := rendezvous.Slots(tableBits); slots > 0 {
		return slots + slots/rendezvous.LeastSlots
	}
	return members
}

// quarter returns how many elements of a map one list may use.
func quarter(size int) int { return size / 4 }

// reserve returns how many elements are reserved for changes of existing frontends.
func reserve(size int) int { return (size + 9) / 10 }

// reservedMembers returns how many members are reserved for changes of existing frontends: at least the space to
// exchange the largest table.
func (s *store) reservedMembers(tableBits int) int {
	return max(reserve(s.nMembers), s.longest(tableBits))
}

// longest returns the length of the longest run with a table, among the existing lists and a list with a table of
// tableBits; 0: no list has a table.
func (s *store) longest(tableBits int) int {
	for bits := len(s.tables) - 1; bits > tableBits; bits-- {
		if s.tables[bits] > 0 {
			return runLength(0, bits)
		}
	}
	return runLength(0, tableBits)
}
