// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// watches are the nodes that only watch: each has a stream on its own connection.
type watches struct {
	all    []*follower
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// follower is one watch of a simulated node.
type follower struct {
	conn   *grpc.ClientConn
	events atomic.Int64 // of members' keys
	sum    atomic.Int64 // sum of the revisions: equal sums show that all watches received the same changes
	failed atomic.Pointer[error]

	mu  sync.Mutex
	lag []time.Duration // guarded by mu; lag of the first change of each message
}

func newWatches(ctx context.Context, endpoint string, n int, revision int64) (*watches, error) {
	ctx, cancel := context.WithCancel(ctx)
	w := &watches{cancel: cancel}
	for range n {
		conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return w, err
		}
		f := &follower{conn: conn}
		w.all = append(w.all, f)
		stream, err := etcdserverpb.NewWatchClient(conn).Watch(ctx)
		if err != nil {
			return w, err
		}
		if err := stream.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
			CreateRequest: &etcdserverpb.WatchCreateRequest{
				Key: []byte(prefix + "/id/"), RangeEnd: []byte(watchedEnd), StartRevision: revision, ProgressNotify: true,
			},
		}}); err != nil {
			return w, err
		}
		if m, err := stream.Recv(); err != nil || !m.GetCreated() {
			return w, fmt.Errorf("watch: %v, %w", m, err)
		}
		w.done.Go(func() {
			if err := f.follow(stream); ctx.Err() == nil {
				f.failed.Store(&err)
			}
		})
	}
	return w, nil
}

func (w *watches) close() {
	if w == nil {
		return
	}
	w.cancel()
	w.done.Wait()
	for _, f := range w.all {
		f.conn.Close()
	}
}

var (
	memberKeys = []byte(prefix + "/ip/n")
	sentField  = []byte(`"sent":`)
)

// follow counts the received messages until the stream ends, and returns the error that ended it.
func (f *follower) follow(stream etcdserverpb.Watch_WatchClient) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.GetCanceled() {
			return fmt.Errorf("the watch was cancelled: %s", m.GetCancelReason())
		}
		now := time.Now()
		first := true
		for _, e := range m.GetEvents() {
			if !bytes.HasPrefix(e.Kv.Key, memberKeys) {
				continue
			}
			f.events.Add(1)
			f.sum.Add(e.Kv.ModRevision)
			if at, ok := sentTime(e); ok && first {
				first = false
				f.mu.Lock()
				f.lag = append(f.lag, now.Sub(at))
				f.mu.Unlock()
			}
		}
	}
}

func sentTime(e *mvccpb.Event) (time.Time, bool) {
	i := bytes.LastIndex(e.Kv.Value, sentField)
	if i < 0 {
		return time.Time{}, false
	}
	digits := bytes.TrimSuffix(e.Kv.Value[i+len(sentField):], []byte("}"))
	nanos, err := strconv.ParseInt(string(digits), 10, 64)
	return time.Unix(0, nanos), err == nil
}

// reset discards the measured lags.
func (w *watches) reset() {
	for _, f := range w.all {
		f.mu.Lock()
		f.lag = f.lag[:0]
		f.mu.Unlock()
	}
}

func (w *watches) lags() (out []time.Duration) {
	for _, f := range w.all {
		f.mu.Lock()
		out = append(out, f.lag...)
		f.mu.Unlock()
	}
	return out
}

// wait returns when every watch has received that many changes, and all have received the same ones.
func (w *watches) wait(ctx context.Context, changes int64) error {
	want := changes
	deadline := time.Now().Add(patience)
	for {
		behind, least := 0, want
		for i, f := range w.all {
			if err := f.failed.Load(); err != nil {
				return fmt.Errorf("watch %d: %w", i, *err)
			}
			have := f.events.Load()
			if have > want {
				return fmt.Errorf("watch %d had %d changes of %d", i, have, want)
			}
			if least = min(least, have); have < want {
				behind++
			}
		}
		if behind == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d of %d watches do not have all %d changes; one has %d", behind, len(w.all), want, least)
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
	for i, f := range w.all {
		if f.sum.Load() != w.all[0].sum.Load() {
			return fmt.Errorf("watches 0 and %d had different changes", i)
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// pageKeys is the number of keys in a page of a listing.
const pageKeys = 5000

// list lists all keys over the connection of every watch, in pages, spread over a time. It returns the size of a
// listing in bytes, and the duration of the slowest one.
func (w *watches) list(ctx context.Context, spread time.Duration) (size int64, slowest time.Duration, err error) {
	pages, err := w.pages(ctx)
	if err != nil {
		return 0, 0, err
	}
	reference, err := w.all[0].list(ctx, pages)
	if err != nil {
		return 0, 0, err
	}
	var longest atomic.Int64
	all, ctx := errgroup.WithContext(ctx)
	for i, f := range w.all {
		all.Go(func() error {
			if err := sleep(ctx, spread*time.Duration(i)/time.Duration(len(w.all))); err != nil {
				return err
			}
			began := time.Now()
			n, err := f.list(ctx, pages)
			if err != nil {
				return err
			}
			for took := int64(time.Since(began)); ; {
				if have := longest.Load(); have >= took || longest.CompareAndSwap(have, took) {
					break
				}
			}
			if n != reference {
				return fmt.Errorf("a listing has %d bytes, another %d", n, reference)
			}
			return nil
		})
	}
	err = all.Wait()
	return reference, time.Duration(longest.Load()), err
}

// pages returns the first keys of the pages of a listing.
func (w *watches) pages(ctx context.Context) (keys [][]byte, err error) {
	c := etcdserverpb.NewKVClient(w.all[0].conn)
	for next := []byte(prefix + "/id/"); ; {
		keys = append(keys, next)
		req := &etcdserverpb.RangeRequest{Key: next, RangeEnd: []byte(watchedEnd), Limit: pageKeys, KeysOnly: true}
		resp, err := c.Range(ctx, req, grpc.MaxCallRecvMsgSize(64<<20))
		if err != nil {
			return nil, err
		}
		if !resp.GetMore() {
			return append(keys, []byte(watchedEnd)), nil
		}
		next = append(bytes.Clone(resp.Kvs[len(resp.Kvs)-1].Key), 0)
	}
}

// list reads all pages and counts their bytes, without decoding them: the cost of decoding is measured on the full
// nodes.
func (f *follower) list(ctx context.Context, pages [][]byte) (size int64, err error) {
	for i := range len(pages) - 1 {
		var answer counted
		req := &etcdserverpb.RangeRequest{Key: pages[i], RangeEnd: pages[i+1], Limit: pageKeys}
		err := f.conn.Invoke(ctx, "/etcdserverpb.KV/Range", req, &answer,
			grpc.ForceCodecV2(counting{}), grpc.MaxCallRecvMsgSize(64<<20))
		if err != nil {
			return 0, err
		}
		size += int64(answer)
	}
	return size, nil
}

// counted is an answer of which only the size is known.
type counted int

// counting is a codec that decodes a message into its size.
type counting struct{}

func (counting) Name() string { return proto.Name }

func (counting) Marshal(v any) (mem.BufferSlice, error) {
	return encoding.GetCodecV2(proto.Name).Marshal(v)
}

func (counting) Unmarshal(data mem.BufferSlice, v any) error {
	n, ok := v.(*counted)
	if !ok {
		return errors.New("not a counted answer")
	}
	*n = counted(data.Len())
	return nil
}
