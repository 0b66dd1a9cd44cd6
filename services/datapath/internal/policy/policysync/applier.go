// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"cmp"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// Config is what the applier has to know.
type Config struct {
	// Name of this subscriber, for the service's status.
	Name    string
	Kernel  Kernel
	Service policystream.Service
	// Addresses of other nodes wait for the tables to know their identity; nil:
	// there are none.
	Addresses Addresses
	// Wait is whether a new endpoint waits for its tables. Without, it begins
	// with the table that lets in the local node alone.
	Wait bool
	// Timeout is how long it waits at most. 0: 10 s.
	Timeout time.Duration
	// Audit lets pass what the policies of this node's endpoints would deny, whatever
	// SetAudit says.
	Audit bool
	// Linger is how long the tables of a subject stay after its last endpoint.
	// 0: one minute.
	Linger time.Duration
	// Retry is the pause before what had no room is tried again. 0: 5 s.
	Retry time.Duration
	// Memory keeps what was enforced; nil: a service that lost its state is
	// believed.
	Memory policystream.Memory
	// Changed is called, without any lock held, after the policy of slots has
	// changed.
	Changed func(slots []uint16)
	Log     *slog.Logger // nothing is logged if nil
	Now     func() time.Time
}

// The places between the writes of one message, named after what is done.
var (
	faultDefine   = fault.Register("datapath/policy/define")
	faultGrow     = fault.Register("datapath/policy/grow")
	faultRows     = fault.Register("datapath/policy/rows")
	faultPrefixes = fault.Register("datapath/policy/prefixes")
	faultEntries  = fault.Register("datapath/policy/entries")
	faultFlip     = fault.Register("datapath/policy/flip")
	faultBump     = fault.Register("datapath/policy/bump")
	faultRetire   = fault.Register("datapath/policy/retire")
	faultAck      = fault.Register("datapath/policy/ack")
)

// Applier keeps the kernel's tables as the service says.
type Applier struct {
	cfg Config
	log *slog.Logger

	mu sync.Mutex
	// What the kernel holds, as this process wrote or found it.
	tables     map[nodetable.ID]*kernelTable // guarded by mu
	identities *identities                   // guarded by mu
	endpoints  *endpoints                    // guarded by mu

	// What the service has said; nil before its first snapshot, and after an
	// error that makes it worthless.
	model       *model   // guarded by mu
	incarnation string   // guarded by mu; of the last message that was carried out
	seq         uint64   // guarded by mu
	next        incoming // guarded by mu
	past        *policystream.Past
	// refused is why nothing of the stream is carried out any more: it has a step
	// that this process does not know.
	refused string // guarded by mu

	rooms    rooms                                      // guarded by mu
	expected map[policytable.ID]policytable.BindSubject // guarded by mu; who has the tables of the message
	unsaid   []policystream.Nack                        // guarded by mu; that answer no message

	// auditAll lets pass what the policies of all endpoints would deny.
	auditAll bool // guarded by mu

	changed         chan struct{} // guarded by mu; closed and replaced when subjects change
	synced          chan struct{} // closed after the first snapshot
	bumpAll         bool          // guarded by mu; the process is new: what it would have bumped is not known
	highest         watermark     // guarded by mu
	waiting         int           // guarded by mu; identities that are kept unknown
	pendingCapacity bool          // guarded by mu; there may be some

	drain   chan struct{} // something waits for a grace period
	session policystream.Health

	// History says which policy evaluated an endpoint.
	History policyhistory.History

	view summary
}

// kernelTable is a table in the kernel.
type kernelTable struct {
	id       nodetable.ID
	content  nodetable.Content // as it is there
	owner    *serviceTable
	meanings map[policytable.Meaning]uint16 // of classes; nil until it is asked for
}

// New returns an applier that knows nothing yet: call Adopt.
func New(cfg Config) *Applier {
	if cfg.Log == nil {
		cfg.Log = log.Discard()
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)
	cfg.Linger = cmp.Or(cfg.Linger, time.Minute)
	cfg.Retry = cmp.Or(cfg.Retry, 5*time.Second)
	a := &Applier{
		cfg: cfg, log: cfg.Log,
		tables:     map[nodetable.ID]*kernelTable{},
		identities: newIdentities(cfg.Kernel, cfg.Addresses),
		endpoints:  newEndpoints(cfg.Now, cfg.Linger), changed: make(chan struct{}), synced: make(chan struct{}),
		bumpAll: true, drain: make(chan struct{}, 1),
		past: policystream.NewPast(cfg.Memory, cfg.Log),
	}
	a.rooms.reset(cfg.Kernel.MapSizes())
	return a
}
