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
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// Config configures an Applier.
type Config struct {
	// Name of this subscriber in the service's status.
	Name    string
	Kernel  Kernel
	Service policystream.Service
	// Addresses of other nodes wait until the tables include their identity; nil: no other nodes.
	Addresses Addresses
	// Wait makes new endpoints wait for their tables. Otherwise they start with the table that
	// allows only the local node.
	Wait bool
	// Timeout of that wait. 0: 10 s.
	Timeout time.Duration
	// Audit keeps all endpoints of this node in audit mode, regardless of SetAudit.
	Audit bool
	// Linger is the time that the tables of a subject stay after its last endpoint. 0: one minute.
	Linger time.Duration
	// Retry is the pause before changes without capacity are retried. 0: 5 s.
	Retry time.Duration
	// Memory saves the enforced state; nil: a service that lost its state is trusted.
	Memory policystream.Memory
	// Changed is called, without any lock held, with the IDs of endpoints after their policy
	// changed.
	Changed func(slots []uint16)
	Log     *slog.Logger // nil: no logging
	Now     func() time.Time
}

// Fault points between the writes of one message, named after the completed step.
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

// Applier follows the service's stream: it takes each message, lets its placer change the kernel's tables, gives
// subjects their present tables, and tracks what is enforced.
type Applier struct {
	cfg Config

	mu      sync.Mutex
	*placer // guarded by mu, except drain; the tables of the service, and what the kernel has of them

	incarnation string   // guarded by mu; of the last applied message
	seq         uint64   // guarded by mu
	next        incoming // guarded by mu
	past        *policystream.Past
	// refused is the reason why no further message of the stream is applied: a step that this process does not support.
	// Empty: messages are applied.
	refused string // guarded by mu

	unsaid []policystream.Nack // guarded by mu; not yet sent, because they answer no message

	// auditAll enables audit mode for all endpoints.
	auditAll bool // guarded by mu

	changed         chan struct{} // guarded by mu; closed and replaced when subjects change
	synced          chan struct{} // closed after the first snapshot
	bumpAll         bool          // guarded by mu; the process is new, so the epochs that are due are unknown
	highest         watermark     // guarded by mu
	waiting         int           // guarded by mu; identities kept unknown
	pendingCapacity bool          // guarded by mu; changes may wait for capacity

	session policystream.Health

	// History records which policy evaluated an endpoint.
	History policyhistory.History

	view summary
}

// New returns an empty applier: call Adopt.
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
		cfg: cfg, changed: make(chan struct{}), synced: make(chan struct{}), bumpAll: true,
		past: policystream.NewPast(cfg.Memory, cfg.Log),
	}
	a.placer = &placer{
		kernel: cfg.Kernel, log: cfg.Log, now: cfg.Now, subjects: a,
		tables: newKernelTables(cfg.Kernel), identities: newIdentities(cfg.Kernel, cfg.Addresses),
		endpoints: newEndpoints(cfg.Now, cfg.Linger), drain: make(chan struct{}, 1),
	}
	a.rooms.reset(cfg.Kernel.MapSizes())
	return a
}
