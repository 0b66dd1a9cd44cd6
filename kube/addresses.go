// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
)

// maxAddresses bounds what is believed of a listing or a file.
const maxAddresses = 64

var addressSchema = durable.Schema{Name: "sluice.kube.addresses.v1", Version: 1}

// addressRecord is the content of the state file.
type addressRecord struct {
	Addresses []string `json:"addresses"` // https://host:port, sorted
}

// addresses are those of the API's servers: what is configured, and then what
// the API said last, also before the last start.
type addresses struct {
	configured []string
	file       string
	log        *slog.Logger

	mu      sync.Mutex
	all     []string      // guarded by mu; never empty
	learned []string      // guarded by mu; sorted
	current string        // guarded by mu; one of all
	changed chan struct{} // guarded by mu; closed when all changes
}

// newAddresses begins with any of those that are configured, so that the nodes of
// a cluster do not all ask the first server.
func newAddresses(configured []string, file string, l *slog.Logger) *addresses {
	a := &addresses{file: file, log: l, changed: make(chan struct{})}
	for _, address := range configured {
		a.configured = append(a.configured, strings.TrimRight(address, "/"))
	}
	a.current = a.configured[rand.IntN(len(a.configured))]
	learned, err := readAddresses(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		l.Error("the last addresses of the Kubernetes API cannot be read; the configured ones are used", log.Err(err))
	}
	a.take(learned)
	return a
}

func readAddresses(file string) ([]string, error) {
	content, err := durable.ReadFile(file, 1<<16)
	if err != nil {
		return nil, err
	}
	var r addressRecord
	if err := durable.Decode(content, addressSchema, &r); err != nil {
		return nil, &durable.RecordError{File: file, Err: err}
	}
	for _, address := range r.Addresses {
		if err := checkAddress(address); err != nil {
			return nil, &durable.RecordError{File: file, Field: "addresses", Err: err}
		}
	}
	return r.Addresses, nil
}

// take makes all of what is configured and learned. Nobody else has a.
func (a *addresses) take(learned []string) {
	learned = learned[:min(len(learned), maxAddresses)]
	a.learned, a.all = learned, slices.Clone(a.configured)
	for _, address := range learned {
		if !slices.Contains(a.all, address) {
			a.all = append(a.all, address)
		}
	}
	if !slices.Contains(a.all, a.current) {
		a.current = a.all[0]
	}
}

// learn replaces what the API said of its addresses. None is no news: the API
// that says so is there.
func (a *addresses) learn(all []string) {
	slices.Sort(all)
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(all) == 0 || slices.Equal(all, a.learned) {
		return
	}
	a.take(all)
	close(a.changed)
	a.changed = make(chan struct{})
	content, err := durable.Encode(addressSchema, addressRecord{Addresses: a.learned})
	if err == nil {
		err = durable.WriteFile(a.file, content, 0o600, durable.SyncFile)
	}
	if err != nil {
		a.log.Error("the addresses of the Kubernetes API were not written", log.Err(err))
	}
}

// hosts returns the addresses without names and ports, sorted, and a channel that
// is closed when they may have changed.
func (a *addresses) hosts() ([]netip.Addr, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []netip.Addr
	for _, address := range a.all {
		u, err := url.Parse(address)
		if err != nil {
			continue
		}
		if ip, err := netip.ParseAddr(u.Hostname()); err == nil {
			out = append(out, ip.Unmap())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), a.changed
}

// now returns the address to ask, and how many there are.
func (a *addresses) now() (current string, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.current, len(a.all)
}

// failed goes on to the next address, unless another request has done so.
func (a *addresses) failed(address string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if address == a.current {
		a.current = a.all[(slices.Index(a.all, address)+1)%len(a.all)]
	}
}

// silent goes on to the next address after one that stopped in the middle of an answer.
func (a *addresses) silent(address, path string, err error) {
	a.log.Warn("the Kubernetes API does not go on", "server", address, "path", path, log.Err(err))
	a.failed(address)
}

// failover sends requests to the address that answered last, and on to the next
// one when it does not. An address that was asked stays until it fails.
type failover struct {
	patient   *patient
	addresses *addresses
}

func newFailover(next http.RoundTripper, a *addresses) *failover {
	return &failover{patient: &patient{next: next, streams: map[string]struct{}{}}, addresses: a}
}

// RoundTrip implements http.RoundTripper. A request without a body, which all
// lists and watches are, is sent to each address before it fails.
func (f *failover) RoundTrip(req *http.Request) (*http.Response, error) {
	address, n := f.addresses.now()
	var failures []error
	for range n {
		to, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		r := req.Clone(req.Context())
		r.URL.Host, r.Host = to.Host, to.Host
		resp, err := f.patient.roundTrip(r, func(err error) { f.addresses.silent(address, r.URL.Path, err) })
		if err == nil {
			if resp.StatusCode >= http.StatusInternalServerError {
				f.addresses.failed(address) // the caller repeats it
			}
			return resp, nil
		}
		if req.Context().Err() != nil {
			return nil, err
		}
		failures = append(failures, err)
		f.addresses.failed(address)
		if req.Body != nil && req.Body != http.NoBody {
			break
		}
		address, _ = f.addresses.now()
	}
	if len(failures) == 1 {
		return nil, failures[0] // client-go looks at its type
	}
	return nil, errors.Join(failures...)
}

// WrappedRoundTripper lets client-go close idle connections.
func (f *failover) WrappedRoundTripper() http.RoundTripper { return f.patient.next }
