// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package belief

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/watch"
)

// machine is a node whose clock, service and peers the test controls.
type machine struct {
	t       *testing.T
	now     time.Duration
	boot    string
	answer  Answer
	err     error
	peers   map[string]Peer
	changed int
	path    string
	*Beliefs
}

func (m *machine) Confirm(context.Context, watch.Origin) (Answer, error) { return m.answer, m.err }

func newMachine(t *testing.T) *machine {
	m := &machine{
		t: t, now: time.Hour, boot: "boot-1", path: filepath.Join(t.TempDir(), "belief.json"),
		answer: Answer{Heard: true, Stale: 15 * time.Minute}, peers: map[string]Peer{},
	}
	m.start()
	return m
}

// start starts a process.
func (m *machine) start() {
	m.Beliefs = Open(Options{
		Service: m,
		Path:    m.path, BootID: m.boot, Now: func() time.Duration { return m.now },
	})
}

// pass advances the clock, with a step every 5 s.
func (m *machine) pass(d time.Duration) {
	for end := m.now + d; m.now < end; {
		m.now += 5 * time.Second
		m.step(m.t.Context(), Inputs{
			Applied: func() watch.Origin { return watch.Origin{} }, Peers: func() map[string]Peer { return m.peers },
			Changed: func() error { m.changed++; return nil },
		})
	}
}

func (m *machine) expect(when string, want map[string]bool) {
	m.t.Helper()
	for node, trusted := range want {
		if got := m.Trusts(node); got != trusted {
			m.t.Errorf("%s: node %s is trusted: %t", when, node, got)
		}
	}
}

var (
	hears = Peer{Said: true, Valid: true, Silence: 3 * time.Second}
	cut   = Peer{Said: true, Valid: true, Silence: time.Minute}
)

// TestNodeThatIsCutOffTrustsOnlyNodesThatAreCutOff: 15 minutes after the identity service became unavailable or lost
// the store, the node trusts only nodes that are cut off, too, until it hears from the store again. Nodes without a
// recent answer, or whose answers do not report when they last heard from the store, are not trusted.
func TestNodeThatIsCutOffTrustsOnlyNodesThatAreCutOff(t *testing.T) {
	for name, away := range map[string]func(m *machine){
		"the service is unavailable":       func(m *machine) { m.err = errors.New("away") },
		"the service has restarted":        func(m *machine) { m.answer.Heard = false },
		"the service hears from no store":  func(m *machine) {},
		"the clock of the service stopped": func(m *machine) { m.answer.Silence = time.Second; m.err = errors.New("away") },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.peers = map[string]Peer{
				"hears": hears, "cut": cut, "almost": {Said: true, Valid: true, Silence: time.Minute - time.Second},
				"long ago": {Said: true, Silence: time.Hour}, "earlier version": {Said: true}, "no answer": {},
			}
			all := map[string]bool{
				"hears": true, "cut": true, "almost": true, "long ago": true, "earlier version": true, "no answer": true,
			}
			m.pass(time.Hour)
			m.expect("while it hears", all)
			if m.changed != 0 {
				t.Errorf("Changed was called %d times", m.changed)
			}
			away(m)
			silent := func(d time.Duration) {
				for end := m.now + d; m.now < end; m.pass(5 * time.Second) {
					m.answer.Silence += 5 * time.Second
				}
			}
			silent(14 * time.Minute)
			m.expect("after 14 minutes", all)
			silent(90 * time.Second)
			none := map[string]bool{
				"hears": false, "cut": true, "almost": false, "long ago": false, "earlier version": false, "no answer": false,
				"unheard of": false,
			}
			m.expect("after more than 15 minutes", none)
			m.start()
			m.expect("in a new process", map[string]bool{"hears": false, "cut": true, "no answer": false})
			silent(time.Minute)
			m.expect("a minute later", none)
			m.answer, m.err = Answer{Heard: true, Stale: 15 * time.Minute}, nil
			m.pass(5 * time.Second)
			m.expect("when it hears again", all)
		})
	}
}

// TestRestartsDoNotExtendTrust: the time at which the node last heard from the store is kept across restarts of the
// process, so restarts do not extend the time for which mappings are trusted. After a reboot, or with a corrupt file,
// the node counts as cut off, and no earlier decision covers nodes that have not answered yet. Without a file, as after
// an upgrade, the time starts now.
func TestRestartsDoNotExtendTrust(t *testing.T) {
	m := newMachine(t)
	m.peers = map[string]Peer{"hears": hears}
	m.pass(time.Hour)
	m.err = errors.New("away")
	for range 14 {
		m.pass(time.Minute)
		m.start()
		m.expect("in the first minutes", map[string]bool{"hears": true})
	}
	m.pass(2 * time.Minute)
	m.expect("after 16 minutes with many restarts", map[string]bool{"hears": false})
	m.now += 24 * time.Hour // suspended
	m.err = nil
	m.pass(5 * time.Second)
	m.expect("when it hears", map[string]bool{"hears": true})

	m.boot, m.now, m.err = "boot-2", time.Second, errors.New("away")
	m.peers["no answer"] = Peer{}
	m.start()
	m.pass(5 * time.Second)
	m.expect("after a reboot", map[string]bool{"hears": false, "no answer": false})
	if d, known := m.Silence(); !known || d < 1000*time.Hour {
		t.Errorf("after a reboot Silence returns %s, %t", d, known)
	}
	if err := os.WriteFile(m.path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.start()
	m.pass(5 * time.Second)
	m.expect("with a corrupt file", map[string]bool{"hears": false, "no answer": false})
	if err := os.Remove(m.path); err != nil {
		t.Fatal(err)
	}
	m.start()
	m.pass(14 * time.Minute)
	m.expect("without a file", map[string]bool{"hears": true})
	if _, known := m.Silence(); known {
		t.Error("without a file and an answer, Silence is known")
	}
	m.pass(2 * time.Minute)
	m.expect("without a file, later", map[string]bool{"hears": false})
}

// TestWithAServiceOfAnEarlierVersionAllMappingsAreTrusted tests an identity service that does not report how long it
// has not heard from the store.
func TestWithAServiceOfAnEarlierVersionAllMappingsAreTrusted(t *testing.T) {
	m := newMachine(t)
	m.peers, m.err = map[string]Peer{"hears": hears}, ErrUnsupported
	m.pass(time.Hour)
	m.expect("after an hour", map[string]bool{"hears": true})
	if _, known := m.Silence(); known {
		t.Error("Silence is known")
	}
}
