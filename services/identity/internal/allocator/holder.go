// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"
)

// Holder is who holds a number on this node: an endpoint or a reference that
// a caller chose. The two cannot be confused.
type Holder string

const (
	endpointPrefix  = "endpoint:"
	referencePrefix = "reference:"
	maxHolder       = 512
)

// EndpointHolder is an attachment of a container.
func EndpointHolder(containerID, interfaceName string) Holder {
	return Holder(endpointPrefix + containerID + "/" + interfaceName)
}

// ReferenceHolder is a string of the caller's.
func ReferenceHolder(reference string) Holder { return Holder(referencePrefix + reference) }

// ParseHolder reads what String wrote.
func ParseHolder(s string) (Holder, error) {
	known := strings.HasPrefix(s, endpointPrefix) || strings.HasPrefix(s, referencePrefix)
	if !known || len(s) > maxHolder || !utf8.ValidString(s) {
		return "", fmt.Errorf("holder %.80q: want %s… or %s…", s, endpointPrefix, referencePrefix)
	}
	return Holder(s), nil
}

// String is "endpoint:container/interface" or "reference:text".
func (h Holder) String() string { return string(h) }

// keyed is a lock per key that respects contexts and forgets unused keys.
type keyed struct {
	mu    sync.Mutex
	locks map[string]*keyLock // guarded by mu
}

type keyLock struct {
	token chan struct{} // holds one element while the key is locked
	users int           // guarded by keyed.mu
}

// lock waits for the key; the caller must call unlock unless err is set.
func (k *keyed) lock(ctx context.Context, key string) (unlock func(), err error) {
	k.mu.Lock()
	if k.locks == nil {
		k.locks = map[string]*keyLock{}
	}
	l := k.locks[key]
	if l == nil {
		l = &keyLock{token: make(chan struct{}, 1)}
		k.locks[key] = l
	}
	l.users++
	k.mu.Unlock()
	leave := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(k.locks, key)
		}
	}
	select {
	case l.token <- struct{}{}:
		return func() { <-l.token; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
