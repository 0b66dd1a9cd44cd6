// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

var unlessInUse = Removal{UnlessInUse: true}

// TestRemovalUnlessInUseLeavesWhatAContainerHas: a namespace, a device in it, or a creation in
// progress is in use.
func TestRemovalUnlessInUseLeavesWhatAContainerHas(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(m *machine, s endpoint.Spec)
		inUse   string // expected part of the error; empty: no error
	}{
		"all is there": {func(*machine, endpoint.Spec) {}, "its device "},
		"the device was removed": {
			func(m *machine, _ endpoint.Spec) { m.removeDevices() }, "its network namespace /run/netns/a",
		},
		"the name of the namespace is gone": {
			func(m *machine, s endpoint.Spec) { delete(m.namespaces, s.Netns) }, "its device ",
		},
		"the namespace is gone": {func(m *machine, s endpoint.Spec) { m.removeNamespace(s.Netns) }, ""},
		"another namespace has the name": {func(m *machine, s endpoint.Spec) {
			m.removeNamespace(s.Netns)
			m.addNamespace(s.Netns)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine()
			core := m.start(t)
			s := m.wanted("a", 2)
			if _, err := core.Create(t.Context(), s, false); err != nil {
				t.Fatal(err)
			}
			c.happens(m, s)
			for _, validate := range []bool{true, false} {
				was, existed, err := core.Remove(t.Context(), s.Owner, Removal{UnlessInUse: true, ValidateOnly: validate})
				if !existed || errors.Is(err, endpoint.ErrInUse) != (c.inUse != "") || err == nil != (c.inUse == "") {
					t.Fatalf("validate %t: existed %t, %v, want in use: %q", validate, existed, err, c.inUse)
				}
				if err != nil && !strings.Contains(err.Error(), c.inUse) {
					t.Errorf("the error %q does not contain %q", err, c.inUse)
				}
				if err == nil && (was.Spec.Owner != s.Owner || was.Identity.Number == 0 || len(was.Spec.Addrs) != 2) {
					t.Errorf("validate %t: it was %+v", validate, was)
				}
				if _, err := core.Get(s.Owner); (err == nil) != (c.inUse != "" || validate) {
					t.Errorf("validate %t: endpoint afterwards: %v", validate, err)
				}
			}
			if m.open != 0 {
				t.Errorf("%d namespaces are left open", m.open)
			}
			if c.inUse != "" {
				if _, existed, err := core.Remove(t.Context(), s.Owner, Removal{}); !existed || err != nil {
					t.Errorf("by force: %t, %v", existed, err)
				}
			}
			settle(t, core)
			m.holds(t, core, 0)
			if was, existed, err := core.Remove(t.Context(), s.Owner, unlessInUse); existed || err != nil ||
				was.Spec.Owner != (workload.Owner{}) {
				t.Errorf("again: %+v, %t, %v", was, existed, err)
			}
		})
	}
}

// removeDevices removes every device, as an operator could, and leaves the namespaces.
func (m *machine) removeDevices() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.devices)
}

// TestRemovalUnlessInUseEndsNoCreation: the removal neither cancels a running creation nor waits for its end.
func TestRemovalUnlessInUseEndsNoCreation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		c := m.start(t)
		s := m.wanted("a", 2)
		gate := make(chan struct{})
		m.mu.Lock()
		m.block["configure"] = gate
		m.mu.Unlock()
		created := make(chan error, 1)
		go func() {
			_, err := c.Create(t.Context(), s, false)
			created <- err
		}()
		servicetest.Eventually(t, "the creation waits", func() bool {
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.held["configure"]
		})
		if _, existed, err := c.Remove(t.Context(), s.Owner, unlessInUse); !existed || !errors.Is(err, endpoint.ErrInUse) {
			t.Errorf("removed %t, %v, want ErrInUse", existed, err)
		}
		m.mu.Lock()
		delete(m.block, "configure")
		m.mu.Unlock()
		close(gate)
		if err := <-created; err != nil {
			t.Errorf("create: %v", err)
		}
		m.holds(t, c, 1)
	})
}

// TestRemovalUnlessInUseKnowsTheDeviceOfAnUnreadableRecord: the device name is derived from the
// owner, which suffices to see that the container exists.
func TestRemovalUnlessInUseKnowsTheDeviceOfAnUnreadableRecord(t *testing.T) {
	m, c, lost, _ := damaged(t)
	if _, existed, err := c.Remove(t.Context(), lost.Owner, unlessInUse); !existed || !errors.Is(err, endpoint.ErrInUse) {
		t.Fatalf("removed %t, %v, want ErrInUse", existed, err)
	}
	m.removeNamespace(lost.Netns)
	if was, existed, err := c.Remove(t.Context(), lost.Owner, unlessInUse); !existed || err != nil ||
		was.Spec.Owner != (workload.Owner{}) {
		t.Fatalf("the container is gone: %+v, %t, %v", was, existed, err)
	}
	settle(t, c)
	m.holds(t, c, 1)
}
