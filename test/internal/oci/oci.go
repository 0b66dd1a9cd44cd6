// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package oci writes container images of one static binary as OCI archives, so
// that tests need no registry.
package oci

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"runtime"
)

// Image describes an image with one layer that contains one executable.
type Image struct {
	// Name is the full reference, for example "sluice.test/pause:1".
	Name string
	// Binary is the path of a static executable on this machine.
	Binary string
	// Entrypoint is the path of the executable in the image, for example "/pause".
	Entrypoint string
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// WriteArchive writes the image to file as an OCI image layout in a tar
// archive (OCI image specification 1.0, "image layout").
func WriteArchive(file string, img Image) error {
	executable, err := os.ReadFile(img.Binary)
	if err != nil {
		return fmt.Errorf("read the image's executable: %w", err)
	}
	layer, err := archive([]entry{{name: path.Clean(img.Entrypoint)[1:], mode: 0o755, content: executable}})
	if err != nil {
		return fmt.Errorf("write the layer of %s: %w", img.Name, err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       map[string]any{"Entrypoint": []string{img.Entrypoint}, "WorkingDir": "/"},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     "application/vnd.oci.image.manifest.v1+json",
		"config": descriptor{
			MediaType: "application/vnd.oci.image.config.v1+json", Digest: digest(config),
			Size: len(config),
		},
		"layers": []descriptor{{
			MediaType: "application/vnd.oci.image.layer.v1.tar", Digest: digest(layer),
			Size: len(layer),
		}},
	})
	if err != nil {
		return err
	}
	index, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"manifests": []descriptor{{
			MediaType:   "application/vnd.oci.image.manifest.v1+json",
			Digest:      digest(manifest),
			Size:        len(manifest),
			Annotations: map[string]string{"io.containerd.image.name": img.Name},
		}},
	})
	if err != nil {
		return err
	}
	out, err := archive([]entry{
		{name: "oci-layout", mode: 0o644, content: []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{name: "index.json", mode: 0o644, content: index},
		{name: blob(manifest), mode: 0o644, content: manifest},
		{name: blob(config), mode: 0o644, content: config},
		{name: blob(layer), mode: 0o644, content: layer},
	})
	if err != nil {
		return fmt.Errorf("write the archive of %s: %w", img.Name, err)
	}
	return os.WriteFile(file, out, 0o600)
}

type entry struct {
	name    string
	mode    int64
	content []byte
}

func archive(entries []entry) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		header := &tar.Header{Name: e.name, Mode: e.mode, Size: int64(len(e.content)), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func blob(content []byte) string {
	return "blobs/sha256/" + digest(content)[len("sha256:"):]
}
