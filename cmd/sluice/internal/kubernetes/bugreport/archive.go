// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// spool holds the files of a report until they are written in order: nodes answer in any.
type spool struct {
	dir   string
	files []string
}

// add keeps a file. Not for use by several goroutines at once.
func (s *spool) add(name string, content []byte) error {
	path := filepath.Join(s.dir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		return err
	}
	s.files = append(s.files, name)
	return nil
}

// write writes the files into an archive below one directory, sorted by name, which appears under its own name when it
// is complete.
func (s *spool) write(file, directory string, at time.Time) (err error) {
	temporary, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*.tmp") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(temporary.Name()))
		}
	}()
	compressed := gzip.NewWriter(temporary)
	archive := tar.NewWriter(compressed)
	slices.Sort(s.files)
	for _, name := range s.files {
		if err := s.copyTo(archive, name, directory, at); err != nil {
			return errors.Join(err, temporary.Close())
		}
	}
	if err := errors.Join(archive.Close(), compressed.Close(), temporary.Close()); err != nil {
		return err
	}
	return os.Rename(temporary.Name(), file)
}

func (s *spool) copyTo(archive *tar.Writer, name, directory string, at time.Time) error {
	content, err := os.Open(filepath.Join(s.dir, filepath.FromSlash(name)))
	if err != nil {
		return err
	}
	defer content.Close()
	info, err := content.Stat()
	if err != nil {
		return err
	}
	if err := archive.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: directory + "/" + name, Mode: 0o600, Size: info.Size(), ModTime: at,
		Format: tar.FormatPAX,
	}); err != nil {
		return err
	}
	_, err = io.Copy(archive, content)
	return err
}
