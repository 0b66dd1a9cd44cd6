// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// SetZone says in which zone the node is, for topology hints. A state remembers it for
// the next run with managed.SourceKubernetes. It is not for an owner whose configuration says
// the zone.
func (o *Owner) SetZone(ctx context.Context, zone string) error {
	_, err := o.revise(ctx, func() (*edit, error) {
		e := &edit{}
		if zone != o.config.Node.Zone {
			e.zone = &zone
		}
		return e, nil
	}, func(*edit) {})
	return err
}

// hinted adds to an edit the services whose frontends depend on the zone.
func (o *Owner) hinted(e *edit) {
	for name, j := range o.services {
		if j.object == nil || !j.hasZoneHints() {
			continue
		}
		e.touched[name] = struct{}{}
		e.content = true
	}
}

func (j *joined) hasZoneHints() bool {
	for _, x := range j.slices {
		var last service.About // of most endpoints it is the same
		for _, e := range x.slice.Endpoints {
			if a := e.About(); a != last {
				if last = a; a.ForZones != "" {
					return true
				}
			}
		}
	}
	return false
}
