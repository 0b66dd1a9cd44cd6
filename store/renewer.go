// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
)

// Renewer keeps the credentials in a directory valid, and their addresses current.
type Renewer struct {
	dir string
	log *slog.Logger
	now func() time.Time
	// failed has an element after a connection failed, until the next request; news after Publish.
	failed, news chan struct{}
	// For a store in Kubernetes: the name of the node, and a function that returns the token with which it enrols.
	// token is nil for another store.
	node  string
	token func() (string, error)

	mu        sync.Mutex
	current   Credentials // guarded by mu
	published Published   // guarded by mu; what a store in Kubernetes has published
	doubtful  bool        // guarded by mu; a connection failed, and no member has accepted the credentials since then
	problem   error       // guarded by mu; error of the last attempt
}

// NewRenewer reads the credentials in a directory, which has one Renewer.
func NewRenewer(dir, node string, now func() time.Time, l *slog.Logger) (*Renewer, error) {
	c, err := Load(dir)
	if err != nil {
		return nil, err
	}
	if c.Node != node {
		return nil, fmt.Errorf("credentials of the store: %s belongs to the node %q, and this node is called %q; "+
			"set the name back, or join again", dir, c.Node, node)
	}
	if _, err := c.TLS(); err != nil {
		return nil, err
	}
	r := newRenewer(dir, node, now, l)
	r.current = c
	return r, nil
}

func newRenewer(dir, node string, now func() time.Time, l *slog.Logger) *Renewer {
	return &Renewer{
		dir: dir, node: node, log: l, now: now, failed: make(chan struct{}, 1), news: make(chan struct{}, 1),
	}
}

// NewKubernetesRenewer returns the Renewer of a node of a store in Kubernetes. The caller passes the addresses of the
// store to Publish. Whenever the node has no usable credentials, it enrols with a token of its account. So missing or
// corrupt credentials, or credentials of another node, are not an error.
func NewKubernetesRenewer(
	dir, node string, token func() (string, error), now func() time.Time, l *slog.Logger,
) *Renewer {
	r := newRenewer(dir, node, now, l)
	r.token = token
	c, err := Load(dir)
	if err == nil && c.Node == node {
		_, err = c.TLS()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil || c.Node != node:
		l.Warn("the saved credentials for the store cannot be used; the node enrols again", "node", c.Node, log.Err(err))
	default:
		r.current = c
	}
	return r
}

// InKubernetes reports whether the store is in Kubernetes. Such a store has a key by which it allows new numbers.
func (r *Renewer) InKubernetes() bool { return r.token != nil }

// Publish sets the addresses of a store in Kubernetes.
func (r *Renewer) Publish(p Published) {
	r.mu.Lock()
	r.published = p
	r.mu.Unlock()
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// Current returns the credentials.
func (r *Renewer) Current() Credentials {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current
}

// Problem returns why the credentials were not renewed when it was time; nil if they were.
func (r *Renewer) Problem() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.problem
}

// Failed makes the Renewer ask for the members soon: a connection to a member failed, perhaps because of a new epoch.
func (r *Renewer) Failed() {
	r.mu.Lock()
	r.doubtful = true
	r.mu.Unlock()
	select {
	case r.failed <- struct{}{}:
	default:
	}
}

// The node renews its certificate after two thirds of its life, so that a store may be unavailable for the last third.
// It asks for the members more often, at a random moment, because members change.
const (
	locateEvery = time.Minute
	retryAfter  = 15 * time.Second
	soon        = 4 * time.Second // minimum time to the next request after a connection has failed
)

// Run renews until ctx ends. changed is called after each change.
func (r *Renewer) Run(ctx context.Context, changed func(Credentials)) error {
	for {
		wait := locateEvery/2 + rand.N(locateEvery)
		if !r.step(ctx, changed) {
			wait = retryAfter/2 + rand.N(retryAfter)
		}
		least := time.After(soon/2 + rand.N(soon))
		select {
		case <-time.After(wait):
		case <-r.news:
		case <-r.failed:
			select {
			case <-least:
			case <-ctx.Done():
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// step renews the certificate if it is time, or asks for the members. It reports whether that succeeded.
func (r *Renewer) step(ctx context.Context, changed func(Credentials)) bool {
	old := r.Current()
	c, due, err := r.next(ctx, old)
	if err == nil && !same(c, old) {
		err = c.Save(r.dir)
	}
	r.mu.Lock()
	repeated := r.problem != nil
	if r.problem = err; err == nil {
		r.current = c
	}
	r.mu.Unlock()
	if err != nil {
		if ctx.Err() == nil && !repeated {
			r.log.Error("the credentials for the store are not renewed; see docs/store.md", "due", due, log.Err(err))
		}
		return false
	}
	if !same(c, old) {
		r.log.Info("the credentials for the store changed", "epoch", c.Epoch, "members", c.Clients, "renewed", due)
		changed(c)
	}
	return true
}

// next returns the credentials after a request. due reports whether it was time for another certificate.
func (r *Renewer) next(ctx context.Context, old Credentials) (c Credentials, due bool, err error) {
	if r.token != nil {
		return r.follow(ctx, old)
	}
	if due, err = r.due(old); err != nil {
		return old, due, err
	}
	if due {
		c, err = Renew(ctx, old)
	} else {
		c, err = Locate(ctx, old)
	}
	return c, due, err
}

// follow does the same as next for a store in Kubernetes: the node enrols in each new epoch, because the CA has
// changed.
func (r *Renewer) follow(ctx context.Context, old Credentials) (c Credentials, due bool, err error) {
	r.mu.Lock()
	p, doubtful := r.published, r.doubtful
	r.mu.Unlock()
	if p.Epoch > old.Epoch {
		c, err := r.enrol(ctx, p)
		return c, true, err
	}
	if old.Epoch == 0 {
		return old, true, fmt.Errorf("%w: no store has published its address in the ConfigMap %s", ErrNone, ObjectName)
	}
	if due, err = r.due(old); err != nil {
		return old, due, err
	}
	c = old
	if p.Epoch == old.Epoch {
		c.Clients, c.Enrol = p.Clients, p.Enrol
	}
	switch {
	case due:
		if c, err = Renew(ctx, c); err != nil && p.Epoch == old.Epoch {
			c, err = r.enrol(ctx, p)
		}
	case doubtful && p.Epoch == old.Epoch:
		c, due, err = r.check(ctx, c, p)
	}
	if err == nil && !due && p.Epoch != 0 && p.Epoch < old.Epoch {
		err = fmt.Errorf("the ConfigMap %s has epoch %d, and this node knows epoch %d; if the store was installed anew, "+
			"remove %s and restart sluice-identity", ObjectName, p.Epoch, old.Epoch, filepath.Join(r.dir, File))
	}
	return c, due, err
}

// check asks a member whether it accepts the credentials, and enrols if it does not: the store withdraws them when the
// Node is deleted, and the Node may have been created again. enrolled reports whether the node enrols. If no member
// answers, the credentials stay unchanged.
func (r *Renewer) check(ctx context.Context, old Credentials, p Published) (c Credentials, enrolled bool, err error) {
	_, err = Locate(ctx, old)
	if status.Code(err) != codes.Unauthenticated {
		if err == nil {
			r.accepted()
		}
		return old, false, nil
	}
	if c, err = r.enrol(ctx, p); err != nil {
		return old, true, fmt.Errorf("the store refuses the certificate of this node, and the node cannot enrol: %w", err)
	}
	r.accepted()
	return c, true, nil
}

// accepted records that a member accepts the credentials.
func (r *Renewer) accepted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.doubtful = false
}

// enrol exchanges a token of the node's account for credentials.
func (r *Renewer) enrol(ctx context.Context, p Published) (Credentials, error) {
	token, err := r.token()
	if err != nil {
		return Credentials{}, err
	}
	request, err := NewRequest()
	if err != nil {
		return Credentials{}, err
	}
	return EnrolAccount(ctx, p, r.node, token, request)
}

func (r *Renewer) due(c Credentials) (bool, error) {
	from, to, err := c.Validity()
	if err != nil {
		return false, err
	}
	return r.now().After(from.Add(to.Sub(from) * 2 / 3)), nil
}

func same(a, b Credentials) bool {
	return fmt.Sprint(a) == fmt.Sprint(b)
}
