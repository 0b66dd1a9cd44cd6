// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// secondIdentity is SL_POL_SECOND: the bit of the packed policy entry that selects the second of
// the endpoint's two identities.
const secondIdentity = 0x8000

// Fault points between the writes of a change of identity.
var (
	faultFlipped   = fault.Register("datapath/relabel/flipped")
	faultPublished = fault.Register("datapath/relabel/published")
)

// SetIdentity switches a published endpoint to another identity and the identity's tables with one atomic write, as
// SetPolicy does: each packet is evaluated with the tables of the identity that is valid at that moment, old or new.
// Then it writes the identity to the ipcache. It bumps the epochs of the endpoint and of its addresses, so that all of
// its connections are evaluated again, on both sides.
//
// epoch is the endpoint's new epoch; it is not 0 if the endpoint has the new identity, even with an
// error. The call may be repeated after WaitIdentity.
func (eps *Maps) SetIdentity(
	ctx context.Context, s ID, id identity.Numeric, egress, ingress nodetable.ID,
) (epoch uint32, err error) {
	if err := eps.mayBeEndpoint(id); err != nil {
		return 0, err
	}
	if err := eps.gate.Lock(); err != nil {
		return 0, err
	}
	defer eps.gate.Unlock()
	if err := eps.maySet(s, egress, ingress); err != nil {
		return 0, err
	}
	if _, ok := eps.renamed[s]; ok {
		return 0, fmt.Errorf("%w: endpoint ID %d: a program may still read its former identity", pin.ErrInvalid, s)
	}
	epoch = eps.nextEpoch()
	binary.NativeEndian.PutUint32(eps.slotRecord(s).Second[:], uint32(id))
	eps.renamed[s] = epoch
	atomic.StoreUint64(eps.packedPolicy(s), Policy{Egress: egress, Ingress: ingress, Epoch: epoch}.packed()|secondIdentity)
	if err := faultFlipped.Hit(ctx); err != nil {
		return epoch, err
	}
	if err := eps.publishIdentity(s); err != nil {
		return epoch, err
	}
	return epoch, faultPublished.Hit(ctx)
}

// publishIdentity writes the identity of an endpoint's addresses to the ipcache.
func (eps *Maps) publishIdentity(s ID) error {
	e := eps.at(s)
	for _, a := range e.Addrs() {
		if err := eps.addresses.SetLocal(a, e.Identity); err != nil {
			return fmt.Errorf("ipcache of %v: %w", a, err)
		}
	}
	return nil
}

// WaitIdentity returns when a change of identity is complete: no program that may have read the old
// identity still runs, and the first of the two identities is selected again. It waits for two
// grace periods if there was a change, else not at all.
func (eps *Maps) WaitIdentity(ctx context.Context, s ID) error {
	epoch, ok, err := eps.changing(s)
	if err != nil || !ok {
		return err
	}
	if err := pin.GracePeriod(ctx); err != nil {
		return err
	}
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	same := eps.renamed[s] == epoch // otherwise the ID has another endpoint by now
	if same {
		eps.useFirst(s)
	}
	eps.gate.Unlock()
	if !same {
		return nil
	}
	if err := pin.GracePeriod(ctx); err != nil {
		return err
	}
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	if eps.renamed[s] == epoch {
		delete(eps.renamed, s)
	}
	return nil
}

func (eps *Maps) changing(s ID) (epoch uint32, ok bool, err error) {
	if err := eps.gate.RLock(); err != nil {
		return 0, false, err
	}
	defer eps.gate.RUnlock()
	epoch, ok = eps.renamed[s]
	return epoch, ok, nil
}

// useFirst copies the second identity to the first and selects the first, which has no visible
// effect. No program may still run that read the entry before the second identity was selected.
func (eps *Maps) useFirst(s ID) {
	word := atomic.LoadUint64(eps.packedPolicy(s))
	if word&secondIdentity == 0 {
		return
	}
	r := eps.slotRecord(s)
	atomic.StoreUint32(&r.Identity, binary.NativeEndian.Uint32(r.Second[:]))
	atomic.StoreUint64(eps.packedPolicy(s), word&^secondIdentity)
}

// settleIdentities completes changes of identity that a killed process began.
func (eps *Maps) settleIdentities(used []ID) error {
	changing := false
	for _, s := range used {
		changing = changing || atomic.LoadUint64(eps.packedPolicy(s))&secondIdentity != 0
		e := eps.at(s)
		for _, a := range e.Addrs() {
			owner, err := eps.slotOf(a)
			if err != nil {
				return fmt.Errorf("address %v: %w", a, err)
			}
			info, found, err := eps.addresses.Match(a)
			if err != nil {
				return fmt.Errorf("ipcache of %v: %w", a, err)
			}
			if owner == s && found && info.Identity != e.Identity {
				if err := eps.publishIdentity(s); err != nil {
					return err
				}
			}
		}
	}
	if !changing {
		return nil
	}
	if err := pin.GracePeriod(context.Background()); err != nil {
		return err
	}
	for _, s := range used {
		eps.useFirst(s)
	}
	return pin.GracePeriod(context.Background())
}
