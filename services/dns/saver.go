// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/store"
)

// savePause is the time between writes. A killed process loses the addresses that were learned since the last write.
// The next answer with them is then held once more.
const savePause = time.Second

// saver removes expired addresses and writes changes to the file.
type saver struct {
	table *names.Table
	file  *store.Store
	log   *slog.Logger
	stuck bool // the last write failed
}

func (s *saver) run(ctx context.Context) error {
	tick := time.NewTicker(savePause)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			s.table.Expire(time.Now())
			_ = s.save() // save logs a failure, and a metric reports it
		}
	}
}

// save writes the changes since the last call. If this fails, the next call writes these changes, too.
func (s *saver) save() error {
	records, gone := s.table.TakeChanges()
	err := s.file.Save(records, gone)
	if err != nil {
		s.table.Changed(records, gone)
	}
	if err != nil && !s.stuck {
		s.log.Error("learned names are not written; retrying", log.Err(err))
	}
	if err == nil && s.stuck {
		s.log.Info("learned names are written again")
	}
	s.stuck = err != nil
	return err
}
