// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// SetZone sets the zone of the node, for topology hints. If a configured source delivers the zone, it is also stored
// for the next run. It must not be called if the configuration sets the zone.
func (o *Owner) SetZone(ctx context.Context, zone string) error {
	_, err := o.revise(ctx, func() (*edit, error) {
		e := &edit{}
		if zone != o.index.node.Zone {
			e.zone = &zone
		}
		return e, nil
	}, func(*edit) {})
	return err
}

func (j *joined) hasZoneHints() bool {
	for _, x := range j.slices {
		var last service.About // most endpoints have the same About
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
