// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"errors"
	"fmt"
)

// InUse returns ErrInUse if a container still uses the endpoint: the endpoint's device exists (it
// would vanish with the network namespace), or the namespace exists without the device.
func (r Record) InUse(links Links) error {
	o := r.Spec.Owner
	devices, err := links.Devices()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, d := range devices {
		if d.Name == r.Device.HostName && (r.Device.HostIndex == 0 || r.Device.HostIndex == d.Index) {
			return fmt.Errorf("endpoint of %s: %w: its device %s still exists, so its network namespace does, too",
				o, ErrInUse, d.Name)
		}
	}
	if r.Spec.Netns == "" {
		return nil
	}
	ns, err := links.OpenNamespace(r.Spec.Netns)
	switch {
	case errors.Is(err, ErrNamespaceGone), errors.Is(err, ErrNamespace):
		return nil // the namespace is gone, or the path is a file of another kind now
	case err != nil:
		return fmt.Errorf("open the network namespace of %s: %w", o, err)
	}
	defer ns.Close()
	if ns.ID() != r.Namespace {
		return nil
	}
	return fmt.Errorf("endpoint of %s: %w: its network namespace %s still exists", o, ErrInUse, r.Spec.Netns)
}
