// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/deletion"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
	"github.com/sluice-net/sluice/services/cni-shim/internal/spool"
	"github.com/sluice-net/sluice/services/cni-shim/internal/unary"
)

// del disconnects the container. The datapath releases addresses and identity; if it is unavailable, del writes the
// deletion to the spool.
func (p *Plugin) del(ctx context.Context) error {
	if err := faultDelBegin.Hit(ctx); err != nil {
		return cniError("DEL", err)
	}
	p.phases.begin("delete")
	if err := p.deleteOrSpool(ctx); err != nil {
		return cniError("delete the endpoint", err)
	}
	if err := faultDelDeleted.Hit(ctx); err != nil {
		return cniError("DEL", err)
	}
	// Unbind last, because this mount may be the only reference to the namespace.
	p.phases.begin("unbind")
	if err := p.unbind(p.in.Owner.String()); err != nil {
		return cniError("network namespace", err)
	}
	return nil
}

// unbind removes the mount of an owner's namespace, at the path of this version and of earlier versions.
func (p *Plugin) unbind(owner string) error {
	return errors.Join(netns.Unbind(p.names.Path(owner)), netns.Unbind(p.names.EarlierPath(owner)))
}

func (p *Plugin) deleteOrSpool(ctx context.Context) error {
	var cause error // why the call was last repeated
	for refused := 0; ; {
		existed, err := p.deleteEndpoint(ctx)
		if err == nil {
			p.takeBack(ctx)
			p.did("endpoint deleted", slog.Bool("existed", existed))
			return nil
		}
		if cause != nil && unary.CodeOf(err) == unary.DeadlineExceeded {
			return cause // the cause is more helpful than the error of the deadline
		}
		if delay, ok := retryDelay(err); ok {
			refused++
			cause = err
			if wait, ok := pause(ctx, delay, refused); !ok || !p.waits.sleep(ctx, wait) {
				return err
			}
			continue
		}
		if unary.CodeOf(err) != unary.Unavailable {
			return err
		}
		if absent(p.datapath) {
			return p.spool(ctx)
		}
		// The datapath has just started again, or is about to end.
		if !p.waits.sleep(ctx, reconnectPause) {
			return ctx.Err()
		}
	}
}

// deleteEndpoint calls the datapath once. A missing endpoint counts as deleted.
func (p *Plugin) deleteEndpoint(ctx context.Context) (existed bool, err error) {
	resp, err := request[message.DeleteEndpointResponse](ctx, p.datapath, message.DeleteEndpoint,
		&message.DeleteEndpointRequest{Owner: p.owner()})
	if unary.CodeOf(err) == unary.NotFound {
		return false, nil
	}
	return resp.Existed, err
}

// spool writes the deletion to the spool. A datapath that started in the meantime may have read the spool too early, so
// spool then calls it once more.
func (p *Plugin) spool(ctx context.Context) error {
	p.phases.begin("spool")
	if err := spool.Put(ctx, p.in.Config.StateDir, deletion.Entry{Owner: p.in.Owner, Time: time.Now()}); err != nil {
		return err
	}
	if err := faultDelSpooled.Hit(ctx); err != nil {
		return err
	}
	if !absent(p.datapath) {
		if existed, err := p.deleteEndpoint(ctx); err == nil {
			p.takeBack(ctx)
			p.did("endpoint deleted", slog.Bool("existed", existed))
			return nil
		}
	}
	p.did("deletion spooled, sluice-datapath does not run", slog.String(log.KeyPath, deletion.Dir(p.in.Config.StateDir)))
	return nil
}

// takeBack removes a spooled deletion that was executed.
func (p *Plugin) takeBack(ctx context.Context) {
	// Check first: removing a missing file fails on a read-only disk.
	waits, err := spool.Has(deletion.Dir(p.in.Config.StateDir), p.in.Owner)
	if waits {
		err = spool.Remove(deletion.Dir(p.in.Config.StateDir), p.in.Owner)
	}
	if err != nil {
		p.log.WarnContext(ctx, "spool entry stays", log.KeyError, err.Error())
	}
}

// finishDeletion executes a deletion of this owner in the spool. A datapath that started at the moment when the entry
// was written has not read it. At its next start, it would delete the endpoint that this ADD is about to create.
func (p *Plugin) finishDeletion(ctx context.Context) error {
	waits, err := spool.Has(deletion.Dir(p.in.Config.StateDir), p.in.Owner)
	if err != nil || !waits {
		return err
	}
	if _, err := call(ctx, &p.waits, p.datapath.Path(), p.deleteEndpoint); err != nil {
		return err
	}
	return spool.Remove(deletion.Dir(p.in.Config.StateDir), p.in.Owner)
}
