// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
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

// Apply applies a transaction. When an address becomes a service address, entries of direct connections to that
// address are removed. Otherwise a flow that never pauses would never be translated.
func (f Frontends) Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error) {
	fresh, err := f.fresh(tx)
	if err != nil {
		return frontendtx.Result{}, err
	}
	res, err := f.serviceMaps.Apply(ctx, tx)
	if len(fresh) > 0 {
		err = errors.Join(err, f.k.forgetDirect(ctx, fresh))
	}
	return res, err
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
	var direct []conntrack.Connection
	err := k.Connections.Each(func(cs []conntrack.Connection) error {
		for i := range cs {
			if cs[i].Value.Front == 0 && asksOne(&cs[i], fresh) {
				direct = append(direct, cs[i])
			}
		}
		return ctx.Err()
	})
	for _, c := range direct {
		if err := k.forget(c); err != nil {
			return errors.Join(err, fmt.Errorf("remove direct connection %v: %w", c.Tuple, err))
		}
	}
	return err
}

// asksOne reports whether the responder is one of the frontends.
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
	return errors.New("packets keep changing its entry")
}
