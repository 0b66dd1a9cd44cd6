// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

type serviceMaps = servicemap.Maps

// Frontends gives the owner of services access to the services in the kernel.
type Frontends struct {
	*serviceMaps
	k *Kernel
}

// Frontends returns the handle for the owner of services.
func (k *Kernel) Frontends() Frontends { return Frontends{k.Services, k} }

// Apply applies a transaction. When an address becomes a service address, entries of direct connections to that address
// are removed. Otherwise a flow that never pauses would never be translated. If the removal fails, or the process is
// killed before the removal is complete, the next Apply completes it, in this process or the next one.
func (f Frontends) Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error) {
	if f.k.opened.ValidateOnly {
		return f.serviceMaps.Apply(ctx, tx) // which refuses
	}
	fresh, err := f.fresh(tx)
	if err != nil {
		return frontendtx.Result{}, err
	}
	left := f.k.direct.begin(fresh)
	res, err := f.serviceMaps.Apply(ctx, tx)
	if len(left) > 0 {
		if failed := f.k.forgetDirect(ctx, left); failed != nil {
			f.k.direct.end(left)
			return res, errors.Join(err, failed)
		}
	}
	f.k.direct.end(nil)
	return res, err
}

// direct holds the frontends whose direct connections have not been removed yet. A cell of sl_count tells the next
// process if a removal was not finished.
type direct struct {
	counts *count.Counts

	mu      sync.Mutex
	running int                       // guarded by mu; transactions that have begun and not ended
	left    map[frontend.Key]struct{} // guarded by mu; frontends of failed transactions, or of an earlier process
}

// adopt reads whether an earlier process has left direct connections. The kernel does not store which frontends were
// new, so after a kill direct connections to all of them are removed.
func (d *direct) adopt(counts *count.Counts, keys func() ([]frontend.Key, error)) error {
	d.counts = counts
	if !counts.Forgetting() {
		return nil
	}
	all, err := keys()
	if err != nil {
		return fmt.Errorf("list the frontends: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left = map[frontend.Key]struct{}{}
	for _, k := range all {
		d.left[k] = struct{}{}
	}
	return nil
}

// begin begins a transaction with new frontends. It returns the frontends whose direct connections the transaction must
// remove.
func (d *direct) begin(fresh map[frontend.Key]struct{}) map[frontend.Key]struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.Copy(fresh, d.left)
	d.left = nil
	d.running++
	if len(fresh) > 0 {
		d.counts.SetForgetting(true)
	}
	return fresh
}

// end ends a transaction. left are the frontends whose direct connections it has failed to remove.
func (d *direct) end(left map[frontend.Key]struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running--
	if d.left == nil {
		d.left = map[frontend.Key]struct{}{}
	}
	maps.Copy(d.left, left)
	if d.running == 0 && len(d.left) == 0 && d.counts.Forgetting() {
		d.counts.SetForgetting(false)
	}
}

// fresh returns the keys that the kernel does not have yet.
func (f Frontends) fresh(tx *frontendtx.Transaction) (map[frontend.Key]struct{}, error) {
	fresh := map[frontend.Key]struct{}{}
	for _, c := range tx.Changes() {
		if c.Frontend == nil {
			continue
		}
		known, err := f.Has(c.Key)
		if err != nil {
			return nil, err
		}
		if !known {
			fresh[c.Key] = struct{}{}
		}
	}
	return fresh, nil
}

// forgetTries is the maximum number of attempts of forget to remove a connection that packets keep changing.
const forgetTries = 5

// forgetDirect removes the untranslated connections to addresses that have become frontends.
func (k *Kernel) forgetDirect(ctx context.Context, fresh map[frontend.Key]struct{}) error {
	var found []conntrack.Connection
	err := k.Connections.Each(func(cs []conntrack.Connection) error {
		for i := range cs {
			if cs[i].Value.Front == 0 && asksOne(&cs[i], fresh) {
				found = append(found, cs[i])
			}
		}
		return ctx.Err()
	})
	if err != nil {
		return fmt.Errorf("find direct connections to new frontends: %w", err)
	}
	for _, c := range found {
		if err := k.forget(c); err != nil {
			return fmt.Errorf("remove direct connection %v: %w", c.Tuple, err)
		}
	}
	return nil
}

// asksOne reports whether the connection goes to one of the frontends.
func asksOne(c *conntrack.Connection, fresh map[frontend.Key]struct{}) bool {
	k := frontend.Key{Addr: c.Responder.Addr(), Port: c.Responder.Port(), Protocol: frontend.Protocol(c.Protocol)}
	if _, ok := fresh[k]; ok {
		return true
	}
	if c.To.Slot != endpointmap.HostID {
		return false
	}
	_, ok := fresh[k.NodePort()]
	return ok
}

// forget removes a connection, even while packets change it.
func (k *Kernel) forget(c conntrack.Connection) error {
	for range forgetTries {
		deleted, err := k.Connections.Remove(c)
		if deleted != 0 || err != nil {
			return err
		}
		var found bool
		if c, found, err = k.Connections.Lookup(c.Tuple); !found || err != nil {
			return err
		}
	}
	return errors.New("packets changed the entry at every attempt")
}
