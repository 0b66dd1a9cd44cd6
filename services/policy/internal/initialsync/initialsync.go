// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package initialsync makes subscribers wait until every configured source of policies has been listed completely
// once since the policy state was created, because a missing policy might deny traffic. After that, subscribers need
// not wait any more: the stored state contains the policies, even while a source is unreachable. A file next to the
// state records that a source is complete. It contains the ID of the state, so that it does not count for another
// state.
package initialsync

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Source is a configured source of policies.
type Source struct {
	Name string
	// Of is the location from which the source reads its policies, such as a directory; empty if there is only one.
	// If it changes, the source counts as not listed.
	Of string
	// Earlier versions did not write the files of this package. Whole is set if these versions applied a listing of
	// the source entirely or not at all. Brought is set if the state contains policies of the source. If both are
	// set, the source counts as complete.
	Whole, Brought bool
}

// Accepted records an operator's decision not to wait for a missing part of a source.
type Accepted struct {
	Source string    `json:"source"`
	Part   string    `json:"part"` // the missing part, such as the name of a file
	Why    string    `json:"why"`  // why it was missing
	Time   time.Time `json:"time"`
	State  string    `json:"state"` // the content of the source's file
}

// Tracker tracks which sources are complete. It must be used by one goroutine, except for Opened.
type Tracker struct {
	dir      string
	sources  map[string]*source
	accepted []Accepted
	opened   chan struct{}
}

// source is the state of one source.
type source struct {
	file   string
	text   string // content of the file once the source is complete
	former string // the same, written by versions that did not record Of
	noted  bool   // the file exists with that content
	listed bool   // the source is complete, in this run or an earlier one
}

// acceptedFile contains one Accepted per line.
const acceptedFile = "sources.accepted"

// New returns the tracker of the policy state in dir. It waits for the sources that were not complete since the state
// was created.
func New(dir string, state stream.StateID, sources []Source) (*Tracker, error) {
	g := &Tracker{dir: dir, sources: make(map[string]*source), opened: make(chan struct{})}
	for _, s := range sources {
		one := &source{file: listedFile(dir, s.Name), former: hex.EncodeToString(state[:])}
		one.text = strings.TrimSpace(one.former + " " + s.Of)
		g.sources[s.Name] = one
		text, err := os.ReadFile(one.file)
		switch {
		case err == nil:
			one.noted = string(text) == one.text
			one.listed = one.noted || string(text) == one.former
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		case s.Brought && s.Whole:
			one.listed = true
		case s.Whole:
			// A removed file means that the source must be listed again, although the state contains policies of the
			// source.
			if err := Forget(dir, s.Name); err != nil {
				return nil, err
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, acceptedFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		var a Accepted
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(dir, acceptedFile), err)
		}
		if s := g.sources[a.Source]; s != nil && (s.text == a.State || s.former == a.State) {
			g.accepted = append(g.accepted, a)
		}
	}
	g.openIfListed()
	return g, nil
}

// listedFile returns the file of a source.
func listedFile(dir, name string) string {
	return filepath.Join(dir, strings.ReplaceAll(name, "/", "-")+".listed")
}

// Forget makes the next Tracker of the state in dir wait for a source, even if it was complete before.
func Forget(dir, name string) error {
	return durable.WriteFile(listedFile(dir, name), []byte("incomplete"), 0o600, durable.SyncAll)
}

// Opened returns a channel that is closed once subscribers no longer need to wait.
func (g *Tracker) Opened() <-chan struct{} { return g.opened }

// Open ends the wait of subscribers in this run.
func (g *Tracker) Open() {
	select {
	case <-g.opened:
	default:
		close(g.opened)
	}
}

// IsOpen reports whether subscribers need not wait.
func (g *Tracker) IsOpen() bool {
	select {
	case <-g.opened:
		return true
	default:
		return false
	}
}

func (g *Tracker) openIfListed() {
	for _, s := range g.sources {
		if !s.listed {
			return
		}
	}
	g.Open()
}

// Listed records that a source is complete. If all sources are complete, it ends the wait of subscribers. Unless it
// returns an error, later runs do not wait for the source either.
func (g *Tracker) Listed(name string) error {
	s := g.sources[name]
	if s == nil {
		return nil
	}
	s.listed = true
	g.openIfListed()
	if s.noted {
		return nil
	}
	if err := durable.WriteFile(s.file, []byte(s.text), 0o600, durable.SyncAll); err != nil {
		return fmt.Errorf("cannot record that source %s is complete, so the next start waits for it: %w", name, err)
	}
	s.noted = true
	return nil
}

// HasListed reports whether a source has been complete since the state was created. It returns true for an unknown
// source.
func (g *Tracker) HasListed(name string) bool {
	return g.sources[name] == nil || g.sources[name].listed
}

// Accept records that an operator decided not to wait for a part of a source.
func (g *Tracker) Accept(a Accepted) error {
	a.State = g.sources[a.Source].text
	all := append(slices.Clone(g.accepted), a)
	var text []byte
	for _, x := range all {
		line, err := json.Marshal(x)
		if err != nil {
			return err
		}
		text = append(append(text, line...), '\n')
	}
	if err := durable.WriteFile(filepath.Join(g.dir, acceptedFile), text, 0o600, durable.SyncAll); err != nil {
		return err
	}
	g.accepted = all
	return nil
}

// Accepted returns the missing parts of a source that an operator accepted.
func (g *Tracker) Accepted(name string) (all []Accepted) {
	for _, a := range g.accepted {
		if a.Source == name {
			all = append(all, a)
		}
	}
	return all
}
