// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package lease decides by the Kubernetes API which process runs the store, and in which epoch.
//
// One Lease names the epoch and the data of the store. Each change of it is a compare-and-swap, so two processes never
// have the same epoch. If the Lease names the data of a process, the process continues with them. Any other process may
// begin the next epoch, with an empty store, on two conditions. It has seen the Lease unchanged for some time, in which
// the API server answered all of its requests. And the store that the Lease or the ConfigMap names does not answer.
// Nodes then write the identities and ranges that they hold to the new store.
//
// Epochs only grow. A process that runs the store writes its epoch back if the API server has a lower one, or none:
// the server was restored from a backup, or the object was deleted.
package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/store"
)

// annotations is the prefix of the Lease's annotations: the epoch of the store and, once it serves nodes, what the
// ConfigMap has. The Lease's holder is the ID of the store's data.
const annotations = "store.sluice.io/"

// epochAnnotation of the Lease is the epoch of the store.
const epochAnnotation = annotations + "epoch"

// ErrTaken is returned when another process has the next epoch.
var ErrTaken = errors.New("another process runs the store in a later epoch")

// Data identifies data of the store; the zero value: none.
type Data struct {
	Epoch uint64
	ID    string
}

// Options of a Lease.
type Options struct {
	Client    *kube.Client
	Namespace string
	// Takeover is how long a process must see the Lease unchanged before it begins the next epoch. The process that
	// runs the store renews the Lease every sixth of it.
	Takeover time.Duration
	// Answers reports whether a store answers.
	Answers func(context.Context, store.Published) bool
	Log     *slog.Logger
}

// Lease is the Lease of the store and its ConfigMap.
type Lease struct {
	o            Options
	leases, core rest.Interface
	problem      string // of the last request
}

// New returns a Lease.
func New(o Options) (*Lease, error) {
	leases, err := o.Client.REST(coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	core, err := o.Client.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Lease{o: o, leases: leases, core: core}, nil
}

// renewEvery is the interval of renewals. It is also the time of one request: a renewal that took longer could end
// after another process began to count.
func (l *Lease) renewEvery() time.Duration { return l.o.Takeover / 6 }

// Allowed is how long after a renewal the store may allow new numbers.
func (l *Lease) Allowed() time.Duration { return l.o.Takeover * 2 / 3 }

// seen is what the API server has.
type seen struct {
	lease     *coordinationv1.Lease // nil: none
	held      Data                  // by the Lease
	holder    store.Published       // the store that the Lease names; zero: none, or not readable
	config    *corev1.ConfigMap     // nil: none
	published store.Published       // the store in the ConfigMap; zero: none, or not readable
}

func (l *Lease) read(ctx context.Context) (s seen, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.renewEvery())
	defer cancel()
	lease, config := &coordinationv1.Lease{}, &corev1.ConfigMap{}
	err = l.leases.Get().Namespace(l.o.Namespace).Resource("leases").Name(store.ObjectName).Do(ctx).Into(lease)
	switch {
	case err == nil:
		s.lease = lease
		if s.held.Epoch, err = strconv.ParseUint(lease.Annotations[epochAnnotation], 10, 64); err != nil {
			return s, fmt.Errorf("the Lease %s has the epoch %q; delete the Lease, and the store writes it anew",
				store.ObjectName, lease.Annotations[epochAnnotation])
		}
		if lease.Spec.HolderIdentity != nil {
			s.held.ID = *lease.Spec.HolderIdentity
		}
		s.holder = holderOf(lease)
	case !apierrors.IsNotFound(err):
		return s, fmt.Errorf("read the Lease %s: %w", store.ObjectName, err)
	}
	err = l.core.Get().Namespace(l.o.Namespace).Resource("configmaps").Name(store.ObjectName).Do(ctx).Into(config)
	switch {
	case err == nil:
		s.config = config
		if s.published, err = store.ParsePublished(config.Data); err != nil {
			l.o.Log.Warn("the ConfigMap of the store cannot be read; the store writes it anew", log.Err(err))
			s.published = store.Published{}
		}
	case !apierrors.IsNotFound(err):
		return s, fmt.Errorf("read the ConfigMap %s: %w", store.ObjectName, err)
	}
	return s, nil
}

// annotate writes the addresses of a store into its Lease; zero: they are not known yet.
func annotate(lease *coordinationv1.Lease, p store.Published) {
	for key, value := range p.Data() {
		if len(p.Clients) > 0 {
			lease.Annotations[annotations+key] = value
		} else if annotations+key != epochAnnotation {
			delete(lease.Annotations, annotations+key)
		}
	}
}

// holderOf returns the addresses of the store that a Lease names.
func holderOf(lease *coordinationv1.Lease) store.Published {
	data := map[string]string{}
	for key, value := range lease.Annotations {
		data[strings.TrimPrefix(key, annotations)] = value
	}
	p, err := store.ParsePublished(data)
	if err != nil {
		return store.Published{}
	}
	return p
}

// answers reports whether a store of the Lease or of the ConfigMap answers: either object may have been lost.
func (l *Lease) answers(ctx context.Context, s seen) bool {
	return s.published.Epoch != 0 && l.o.Answers(ctx, s.published) || s.holder.Epoch != 0 && l.o.Answers(ctx, s.holder)
}

// Acquire waits until this process may run the store, with its own data or, if the result has another epoch, with new
// data. id is the ID of new data.
func (l *Lease) Acquire(ctx context.Context, own Data, id string) (Data, error) {
	w := &watch{takeover: l.o.Takeover}
	for {
		s, err := l.read(ctx)
		l.note(ctx, err)
		if err != nil {
			w.failed()
		} else {
			want, ok := decide(s, own, id, w.sees(s, time.Now()))
			if ok && want != own && l.answers(ctx, s) {
				l.o.Log.Warn("the store answers, but does not renew its Lease; this process stands by")
				w.failed()
				ok = false
			}
			if ok {
				err := l.write(ctx, s.lease, want, store.Published{})
				if err == nil {
					return want, nil
				}
				l.note(ctx, err)
				w.failed()
			}
		}
		select {
		case <-time.After(min(time.Second, l.renewEvery())):
		case <-ctx.Done():
			return Data{}, ctx.Err()
		}
	}
}

// watch measures how long the Lease is unchanged, by the clock of this process.
type watch struct {
	takeover time.Duration
	version  string
	since    time.Time // zero: the last request failed
}

func (w *watch) failed() { w.since = time.Time{} }

// sees reports whether the Lease has been unchanged for Takeover.
func (w *watch) sees(s seen, now time.Time) bool {
	version := "none"
	if s.lease != nil {
		version = string(s.lease.UID) + "/" + s.lease.ResourceVersion
	}
	if w.since.IsZero() || version != w.version {
		w.version, w.since = version, now
	}
	return now.Sub(w.since) >= w.takeover
}

// decide returns the data with which this process may run the store; false: none yet.
func decide(s seen, own Data, id string, unchanged bool) (Data, bool) {
	known := max(s.held.Epoch, s.published.Epoch, own.Epoch)
	// The data of this process are the newest, unless another process has data of the same epoch: then the epoch
	// belongs to that process.
	if own.Epoch == known && own.Epoch != 0 && (s.held.Epoch < known || s.held.ID == own.ID) &&
		(s.published.Epoch < known || s.published.ID == own.ID) {
		return own, true
	}
	if unchanged {
		return Data{Epoch: known + 1, ID: id}, true
	}
	return Data{}, false
}

// write makes the Lease name data and the addresses of their store, unless the Lease has changed.
func (l *Lease) write(ctx context.Context, was *coordinationv1.Lease, d Data, p store.Published) error {
	ctx, cancel := context.WithTimeout(ctx, l.renewEvery())
	defer cancel()
	now := metav1.NowMicro()
	seconds := int32(max(l.o.Takeover/time.Second, 1))
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: store.ObjectName, Namespace: l.o.Namespace}}
	if was != nil {
		lease = was.DeepCopy()
	}
	if lease.Annotations == nil {
		lease.Annotations = map[string]string{}
	}
	annotate(lease, p)
	lease.Annotations[epochAnnotation] = strconv.FormatUint(d.Epoch, 10)
	lease.Spec.HolderIdentity, lease.Spec.RenewTime, lease.Spec.LeaseDurationSeconds = &d.ID, &now, &seconds
	if was == nil {
		err := l.leases.Post().Namespace(l.o.Namespace).Resource("leases").Body(lease).Do(ctx).Error()
		return wrap("create the Lease", err)
	}
	err := l.leases.Put().Namespace(l.o.Namespace).Resource("leases").Name(lease.Name).Body(lease).Do(ctx).Error()
	return wrap("renew the Lease", err)
}

// publish writes the addresses of the store to the ConfigMap.
func (l *Lease) publish(ctx context.Context, was *corev1.ConfigMap, p store.Published) error {
	ctx, cancel := context.WithTimeout(ctx, l.renewEvery())
	defer cancel()
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: store.ObjectName, Namespace: l.o.Namespace}}
	if was != nil {
		config = was.DeepCopy()
	}
	config.Data = p.Data()
	if was == nil {
		err := l.core.Post().Namespace(l.o.Namespace).Resource("configmaps").Body(config).Do(ctx).Error()
		return wrap("create the ConfigMap", err)
	}
	err := l.core.Put().Namespace(l.o.Namespace).Resource("configmaps").Name(config.Name).Body(config).Do(ctx).Error()
	return wrap("write the ConfigMap", err)
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", what, store.ObjectName, err)
}

// Keep renews the Lease and the ConfigMap until ctx ends. After each renewal it calls renewed. It returns ErrTaken when
// another process has a later epoch: this process must then end at once.
func (l *Lease) Keep(
	ctx context.Context, p func() store.Published, renewed func(context.Context) error,
) error {
	for {
		err := l.renew(ctx, p(), renewed)
		if errors.Is(err, ErrTaken) {
			return err
		}
		l.note(ctx, err)
		wait := l.renewEvery()
		if err != nil {
			wait = min(wait, time.Second)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
	}
}

func (l *Lease) renew(ctx context.Context, p store.Published, renewed func(context.Context) error) error {
	s, err := l.read(ctx)
	if err != nil {
		return err
	}
	own := Data{Epoch: p.Epoch, ID: p.ID}
	if later(s.held, own) || later(Data{Epoch: s.published.Epoch, ID: s.published.ID}, own) {
		return fmt.Errorf("%w: epoch %d, and this process has epoch %d", ErrTaken, max(s.held.Epoch, s.published.Epoch),
			p.Epoch)
	}
	if s.lease == nil || s.held != own {
		l.o.Log.Warn("the Lease was lost or has an earlier epoch; it is written back", "has", s.held.Epoch,
			"epoch", own.Epoch)
	}
	if err := l.write(ctx, s.lease, own, p); err != nil {
		return err
	}
	if err := renewed(ctx); err != nil {
		return err
	}
	if len(p.Clients) == 0 {
		return nil // etcd does not know the address of this member yet
	}
	if s.config == nil || fmt.Sprint(s.config.Data) != fmt.Sprint(p.Data()) {
		return l.publish(ctx, s.config, p)
	}
	return nil
}

// later reports whether data are of a later epoch than own, or of the same epoch in the hands of another process.
func later(d, own Data) bool { return d.Epoch > own.Epoch || d.Epoch == own.Epoch && d.ID != own.ID }

// note logs when requests begin to fail, and when they work again.
func (l *Lease) note(ctx context.Context, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	switch {
	case ctx.Err() != nil || text == l.problem:
		return
	case err != nil:
		l.o.Log.Warn("cannot read or renew the Lease of the store; trying again", log.Err(err))
	default:
		l.o.Log.Info("the Lease of the store is read and renewed again")
	}
	l.problem = text
}
