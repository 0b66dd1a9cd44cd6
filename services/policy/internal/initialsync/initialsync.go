// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package initialsync keeps subscribers waiting until every configured source of policies
// has been listed completely once since the policy state began: what is missing until
// then may deny. From then on the state has what was in force, also while a source is
// away. A file for each source beside the state holds the name of that state.
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
	// Whole says that versions without a file of this package took its listings as a
	// whole or not at all, and Brought that the state has policies of it.
	Whole, Brought bool
}

// Accepted is a part of a source that an operator did not want to wait for.
type Accepted struct {
	Source string    `json:"source"`
	Part   string    `json:"part"` // such as the name of a file
	Why    string    `json:"why"`  // it was missing
	Time   time.Time `json:"time"`
	State  string    `json:"state"` // as the file of the source has it
}

// Tracker belongs to one goroutine, but for Opened.
type Tracker struct {
	dir      string
	sources  map[string]*source
	accepted []Accepted
	opened   chan struct{}
}

// source is what the tracker knows of one.
type source struct {
	file   string
	text   string // that the file has once the source has listed everything
	noted  bool   // it has that text
	listed bool   // in this run, or in an earlier one
}

// acceptedFile has an Accepted in each line.
const acceptedFile = "sources.accepted"

// New returns the tracker of the policy state in dir, which waits for the sources that
// have not listed everything since the state began.
func New(dir string, state stream.StateID, sources []Source) (*Tracker, error) {
	g := &Tracker{dir: dir, sources: make(map[string]*source), opened: make(chan struct{})}
	for _, s := range sources {
		one := &source{file: listedFile(dir, s.Name), text: hex.EncodeToString(state[:])}
		g.sources[s.Name] = one
		text, err := os.ReadFile(one.file)
		switch {
		case err == nil:
			one.noted = string(text) == one.text
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		case s.Brought && s.Whole:
			one.listed = true
		case s.Whole:
			// From here on, policies in the state do not say that there are no others.
			if err := Forget(dir, s.Name); err != nil {
				return nil, err
			}
		}
		one.listed = one.listed || one.noted
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
		if s := g.sources[a.Source]; s != nil && s.text == a.State {
			g.accepted = append(g.accepted, a)
		}
	}
	g.openIfListed()
	return g, nil
}

// listedFile is the file of a source.
func listedFile(dir, name string) string {
	return filepath.Join(dir, strings.ReplaceAll(name, "/", "-")+".listed")
}

// Forget has the next tracker of the state in dir wait for a source, though it has listed
// everything before.
func Forget(dir, name string) error {
	return durable.WriteFile(listedFile(dir, name), []byte("incomplete"), 0o600, durable.SyncAll)
}

// Opened is closed once subscribers need not wait.
func (g *Tracker) Opened() <-chan struct{} { return g.opened }

// Open lets subscribers pass in this run.
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

// Listed notes that a source has listed everything, and lets subscribers pass if all
// have; in later runs too, unless it returns an error.
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
		return fmt.Errorf("the next start will wait for the source %s: %w", name, err)
	}
	s.noted = true
	return nil
}

// HasListed reports whether a source has listed everything since the state began.
// One that the tracker does not know has.
func (g *Tracker) HasListed(name string) bool {
	return g.sources[name] == nil || g.sources[name].listed
}

// Accept records that an operator does not want to wait for a part of a source.
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

// Accepted are the parts of a source for which no operator wants to wait.
func (g *Tracker) Accepted(name string) (all []Accepted) {
	for _, a := range g.accepted {
		if a.Source == name {
			all = append(all, a)
		}
	}
	return all
}
