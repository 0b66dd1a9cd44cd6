// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/services/datapath/internal/guard"
	"github.com/sluice-net/sluice/services/datapath/internal/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/netns"
)

// Uninstall removes what an instance made in the caller's network namespace: the
// devices of its endpoints, then what the node has for all of them. What is not
// there is no error.
func Uninstall(instance string, cidrs []netip.Prefix) error {
	home, err := netns.Current()
	if err != nil {
		return fmt.Errorf("open the node's network namespace: %w", err)
	}
	defer home.Close()
	o := netdev.Options{Home: home, Instance: instance, PodCIDRs: cidrs}
	for _, p := range cidrs {
		o.NodeAddrs = append(o.NodeAddrs, p.Addr().Next())
	}
	dev, err := netdev.Open(o)
	if err != nil {
		return err
	}
	defer dev.Close()
	err = errors.Join(dev.RemoveDevices(), dev.RemoveNode())
	// The firewall last: until then it drops what a device without programs sends.
	return errors.Join(err, guard.New(home, instance, nil, 0, 0).Remove())
}
